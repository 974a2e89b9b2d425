"use strict";
// What all parts of the page are made with. Text goes in as text, never as markup.

window.addEventListener("error", (event) => {
  const box = document.getElementById("error");
  box.textContent = `This report could not be drawn in full: ${event.message}`;
  box.hidden = false;
  document.documentElement.dataset.error = event.message;
});

const byId = (id) => document.getElementById(id);
const content = JSON.parse(byId("content").textContent);
const MISSING = "–";
const percent = (share) => `${(share * 100).toFixed(1)} %`;
const orMissing = (show) => (value) => (value === null ? MISSING : show(value));
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : word.endsWith("ch") ? "es" : "s"}`;
const whole = (number) => number.toLocaleString("en", { maximumFractionDigits: 0 });

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// ---- tooltip

const tooltip = byId("tooltip");

function showTooltip(event, text, small = "") {
  tooltip.hidden = text === null;
  if (text === null) return;
  tooltip.replaceChildren(text, element("small", "", small));
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const x = Math.max(8, Math.min(event.clientX + 14, document.documentElement.clientWidth - width - 8));
  const y = event.clientY - height - 12;
  tooltip.style.transform = `translate(${x}px, ${y < 8 ? event.clientY + 18 : y}px)`;
}

const hideTooltip = () => { tooltip.hidden = true; };

function tip(target, text, small) {
  target.addEventListener("pointermove", (event) => showTooltip(event, text, small));
  target.addEventListener("pointerdown", (event) => showTooltip(event, text, small));
  target.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hideTooltip());
}

// A drawing tells its figures in <title>s, which need a mouse; the page's tooltip shows them to a finger too.
function tipTitles(drawing) {
  for (const title of drawing.querySelectorAll("title")) {
    const [text, ...rest] = title.textContent.split("\n");
    tip(title.parentElement, text, rest.join("\n"));
    title.remove();
  }
}

// On a narrow screen a wide graph may begin beside the screen.
function scrollToFirstBlock(box) {
  const { x, width } = box.querySelector(".box").getBBox(), middle = x + width / 2;
  if (middle > 0.9 * box.clientWidth) box.scrollLeft = middle - box.clientWidth / 2;
}

// ---- tables

function table(className, head, rows) {
  const made = element("table", className, element("thead", "", ...head));
  made.append(element("tbody", "", ...rows));
  nameCells(head, rows);
  return made;
}

// On a phone the head is not shown, and every cell says itself which column it is of.
function nameCells([top, below], rows) {
  const groups = [...top.children].flatMap((each) => Array(each.colSpan).fill(each.textContent)), single = [...top.children].filter((each) => each.colSpan === 1).length;
  const names = groups.map((name, i) => (below && i >= single ? below.children[i - single].textContent : name));
  for (const each of rows) [...each.children].forEach((made, i) => {
    made.dataset.column = names[i];
    if (below) made.dataset.group = groups[i];
  });
}

// A table may be wider than its card: it scrolls in a box of its own, which the keyboard reaches. On a phone it does not scroll: rows are blocks there.
function scrolling(label, ...children) {
  const box = element("div", "scroll", ...children);
  Object.assign(box, { tabIndex: 0, role: "region", ariaLabel: label });
  return box;
}

const row = (...cells) => element("tr", "", ...cells);
const cell = (text, className = "") => element("td", className, text);

function heading(text, { span = 1, tall = 1, className = "" } = {}) {
  const made = element("th", className, text);
  made.scope = span > 1 ? "colgroup" : "col";
  if (span > 1) made.colSpan = span;
  if (tall > 1) made.rowSpan = tall;
  return made;
}

function rowHeading(...children) {
  const made = element("th", "", ...children);
  made.scope = "row";
  return made;
}

// On a narrow screen the place goes under the name, so that the column leaves room for the numbers.
function workerHeading(text) {
  const [name, ...place] = text.split(/(?= on )/);
  return rowHeading(name, element("span", "place", place.join("")));
}

// Within 10 % is agreement and stays plain; beyond it the colour says whether the run did better or worse.
function ratioCell(ratio, moreIsBetter) {
  if (ratio === null) return cell(MISSING, "ratio quiet");
  const off = Math.abs(Math.round(ratio * 100) - 100) > 10;
  const verdict = !off ? "" : ratio > 1 === moreIsBetter ? "better" : "worse";
  return element("td", "ratio", element("span", verdict, ratio.toFixed(2)));
}

function compared({ predicted, measured, ratio }, show, moreIsBetter) {
  return [cell(orMissing(show)(predicted), "group quiet"), cell(orMissing(show)(measured)), ratioCell(ratio, moreIsBetter)];
}
