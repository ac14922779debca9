// Before the first paint, so that a dark page never flashes white. "" follows the system.
document.documentElement.dataset.theme = localStorage.getItem("onlinerl.theme") || "";
