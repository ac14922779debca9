// Numbers and times as people read them.
import { h } from "./dom.js";

const whole = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });

export const none = "–";
export const count = (n) => (n === null || n === undefined ? none : whole.format(n));
export const percent = (x, digits = 1) => (x === null || x === undefined ? none : `${(x * 100).toFixed(digits)} %`);
export const signed = (x, digits = 3) =>
  x === null || x === undefined ? none : `${x < 0 ? "−" : x > 0 ? "+" : ""}${Math.abs(x).toFixed(digits)}`;
export const number = (x) =>
  x === null || x === undefined ? none
  : Number.isInteger(x) ? count(x)
  : Math.abs(x) >= 100 ? x.toFixed(0)
  : Number(x.toPrecision(3)).toString();

/** 14:05 today, else 3 May 14:05. */
export function when(seconds) {
  const date = new Date(seconds * 1000);
  const time = clock.format(date);
  return date.toDateString() === new Date().toDateString() ? time : `${day.format(date)} ${time}`;
}
export const time = (seconds) =>
  seconds ? h("time", { datetime: new Date(seconds * 1000).toISOString() }, when(seconds)) : none;

export function ago(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s ago`;
  if (s < 3600) return `${Math.round(s / 60)} min ago`;
  if (s < 86400) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86400)} days ago`;
}
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
