// Elements from data, and the smallest change from one tree to the next: what has the focus keeps it.
// Text goes in as text, never as markup: it may be a model's.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "path", "circle", "line", "rect", "g"]);

/** h("p.note", {id: "x"}, "text", child, …): nothing for null and false; arrays are laid flat. */
export function h(name, attributes, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = SHAPES.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.setAttribute("class", [...classes, value].join(" "));
    else if (key === "style") for (const [rule, to] of Object.entries(value)) node.style.setProperty(rule, to);
    else if (key === "spec") node.spec = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child);
  }
  return node;
}

/** Make `from` look like `to`, node by node. */
export function morph(from, to) {
  if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName || from.id !== to.id) {
    from.replaceWith(to);
    return;
  }
  if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
    return;
  }
  for (const { name } of [...from.attributes])
    // what a person opened stays open
    if (!to.hasAttribute(name) && name !== "style" && !(name === "open" && from.nodeName === "DETAILS"))
      from.removeAttribute(name);
  for (const { name, value } of to.attributes)
    if (name !== "style" && from.getAttribute(name) !== value) from.setAttribute(name, value);
  if (from.style.cssText !== to.style.cssText) from.style.cssText = to.style.cssText;
  if (to.spec !== undefined) {
    from.spec = to.spec;
    return;
  }
  children(from, [...to.childNodes]);
}

export function children(parent, wanted) {
  wanted = wanted.flat(Infinity).filter((node) => node !== null && node !== undefined && node !== false);
  wanted.forEach((node, place) => {
    const there = parent.childNodes[place];
    if (there) morph(there, node);
    else parent.append(node);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}
