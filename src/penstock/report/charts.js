// What is drawn in SVG: layers coloured by stage, lines over axes, and small areas in tables.

const STAGE_COLOURS = 8; // of colours.css
const stageColour = (stage) => `var(--stage-${stage % STAGE_COLOURS})`;

const { namespaceURI: SVG } = byId("drawing").content.querySelector("svg");

function svgIn(card, className, label) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", className);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  card.append(svg);
  return svg;
}

// In words, for those who cannot see the line.
function inWords(name, ys, show) {
  const numbers = numbersIn(ys);
  if (!numbers.length) return `${name}: no values`;
  const [low, high] = extremes(numbers);
  return `${name}: ${show(numbers[0])} at first, ${show(numbers[numbers.length - 1])} at last, between ${show(low)} and ${show(high)}`;
}

function svgElement(parent, tag, attributes, text) {
  const element = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function emptySvg(svg, height) {
  const width = Math.max(60, svg.clientWidth);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  return width;
}

function drawLayers(svg, layers, tip) {
  const top = 20, height = 44, width = emptySvg(svg, top + height);
  const seconds = (layer) => layer.forward_s + layer.backward_s;
  const total = layers.reduce((sum, layer) => sum + seconds(layer), 0);
  const stages = [];
  let x = 0;
  for (const layer of layers) {
    const wide = width * (total > 0 ? seconds(layer) / total : 1 / layers.length);
    const rect = svgElement(svg, "rect", {
      x, y: top, width: wide, height, fill: stageColour(layer.stage), "stroke-width": Math.min(1, wide / 6),
    });
    tip(rect, layer.name, `stage ${layer.stage}, forward ${showSeconds(layer.forward_s)}, backward ${showSeconds(layer.backward_s)}`);
    (stages[layer.stage] ??= { from: x }).to = x += wide;
  }
  stages.forEach(({ from, to }, stage) => {
    if (stage > 0) svgElement(svg, "rect", { x: from - 1.25, y: top, width: 2.5, height, fill: "var(--card)" });
    const text = to - from > 56 ? `stage ${stage}` : to - from > 14 ? stage : "";
    svgElement(svg, "text", { x: (from + to) / 2, y: top - 7, "text-anchor": "middle" }, text);
  });
}

// A centred mean over a twentieth of the points: no lag, unlike an exponential one.
function smooth(points) {
  return points.map((_, i) => {
    const reach = Math.min(Math.ceil(points.length / 40), i, points.length - 1 - i); // even-sided at the ends too
    const near = points.slice(Math.max(0, i - reach), i + reach + 1).filter((value) => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value) / near.length : null;
  });
}

// An SVG path through the points that are numbers; where one is not, the line breaks.
function path(values, x, y) {
  let pen = "M";
  return values.map((value, i) => {
    if (value === null) return (pen = "M"), "";
    const step = `${pen}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
    return step;
  }).join("");
}

const numbersIn = (values) => values.filter((value) => value !== null);
const extremes = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// The place in a rising array that is nearest to a value.
function nearest(xs, value) {
  const after = Math.min(xs.length - 1, firstAbove(xs, value)), before = Math.max(0, after - 1);
  return Math.abs(xs[before] - value) <= Math.abs(xs[after] - value) ? before : after;
}

// An axis in round steps over the numbers given: where it begins and ends, its step, and how many decimals that takes.
function axisOver(values, steps, fromZero) {
  let [low, high] = extremes(values);
  if (fromZero) low = Math.min(0, low);
  const range = high - low || Math.abs(high) || 1, step = tickStep(range * 1.05, steps);
  low = Math.floor(low / step + 1e-9) * step;
  high = Math.max(low + step, Math.ceil(high / step - 1e-9) * step);
  return { low, high, step, decimals: Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)) };
}

// The axes of a chart around all values, `xs` from the first to the last. Returns where values are on the screen.
function drawAxes(svg, chart, [first, last], levels, width, height) {
  const vertical = axisOver(levels, height / 55, chart.fromZero);
  const label = (value) => chart.showTick?.(value) ?? value.toLocaleString("en", { minimumFractionDigits: vertical.decimals, maximumFractionDigits: vertical.decimals });
  const box = { left: 16 + 7 * Math.max(label(vertical.low).length, label(vertical.high).length), right: width - 12, top: 12, bottom: height - 42 };
  const span = last - first;
  const xOf = (value) => span > 0 ? box.left + ((value - first) / span) * (box.right - box.left) : (box.left + box.right) / 2;
  const y = (value) => box.bottom - ((value - vertical.low) / (vertical.high - vertical.low)) * (box.bottom - box.top);
  for (let n = 0; vertical.low + n * vertical.step <= vertical.high + vertical.step / 2; n++) {
    const value = vertical.low + n * vertical.step;
    svgElement(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) });
    svgElement(svg, "text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, label(value));
  }
  const tick = Math.max(chart.whole ? 1 : 0, tickStep(span || 1, (box.right - box.left) / 85));
  for (let n = Math.ceil(first / tick - 1e-9) * tick; n <= first + span + tick * 1e-6; n += tick) {
    const anchor = xOf(n) > box.right - 14 ? "end" : "middle";
    svgElement(svg, "text", { x: Math.min(xOf(n), box.right), y: box.bottom + 18, "text-anchor": anchor }, chart.showX(n));
  }
  svgElement(svg, "text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, chart.xName);
  const valueAt = (event) => first + ((event.clientX - svg.getBoundingClientRect().left - box.left) / (box.right - box.left)) * span;
  return { box, xOf, y, valueAt };
}

// Several lines over the same axes. `chart` has: lines (name, colour, xs, ys of each), xName, showX, atX, showY, and if wanted
// fromZero, and smoothed: a line of many points as a moving average.
function drawLines(svg, chart, tip) {
  const lines = chart.lines.filter(({ ys }) => numbersIn(ys).length).map((line) => ({ ...line, ys: chart.smoothed && line.ys.length > 50 ? smooth(line.ys) : line.ys }));
  const height = lines.length ? 280 : 0, width = emptySvg(svg, height);
  if (!lines.length) return;
  const range = extremes(lines.flatMap(({ xs }) => [xs[0], xs[xs.length - 1]]));
  const { xOf, y, valueAt } = drawAxes(svg, chart, range, lines.flatMap(({ ys }) => numbersIn(ys)), width, height);
  for (const { xs, ys, colour } of lines) {
    svgElement(svg, "path", { class: "line", stroke: colour, d: path(ys, (i) => xOf(xs[i]), y) });
    if (numbersIn(ys).length === 1) ys.forEach((value, i) => value !== null && svgElement(svg, "circle", { r: 3.5, fill: colour, cx: xOf(xs[i]), cy: y(value) }));
  }
  svg.onpointermove = svg.onpointerdown = (event) => {
    const value = valueAt(event), at = lines.map(({ xs, ys, name }) => [name, ys[nearest(xs, value)], xs[xs.length - 1]]);
    const there = at.filter(([, found, last]) => found !== null && value <= last).map(([name, found]) => `${name}: ${chart.showY(found)}`);
    tip(event, there.length ? chart.atX(Math.max(range[0], Math.min(range[1], value))) : null, there.join("\n"));
  };
  svg.onpointerleave = (event) => tip(event, null);
}

// A line through (xs, ys). `chart` has: xs, ys, xName, showX, showY, and if wanted: reference (a level to hold against),
// marks (moments on the x axis), fromZero, dots, smoothed. `tip(x, text, small)` shows what is pointed at.
function drawChart(svg, chart, tip) {
  const { xs, ys } = chart, numbers = numbersIn(ys);
  const height = numbers.length ? chart.height ?? 240 : 0, width = emptySvg(svg, height);
  svg.onpointermove = svg.onpointerdown = svg.onpointerleave = null;
  if (!numbers.length) return;
  const levels = chart.reference == null ? numbers : [...numbers, chart.reference];
  const first = xs[0], span = xs[xs.length - 1] - first;
  const { box, xOf, y, valueAt } = drawAxes(svg, chart, [first, first + span], levels, width, height);
  const x = (i) => xOf(xs[i]);
  for (const mark of chart.marks ?? [])
    if (mark.at_s >= first && mark.at_s <= first + span) svgElement(svg, "line", { class: "mark", x1: xOf(mark.at_s), x2: xOf(mark.at_s), y1: box.top, y2: box.bottom });
  if (chart.reference != null) {
    svgElement(svg, "line", { class: "reference", x1: box.left, x2: box.right, y1: y(chart.reference), y2: y(chart.reference) });
    svgElement(svg, "text", { x: box.right, y: y(chart.reference) - 6 < box.top + 8 ? y(chart.reference) + 15 : y(chart.reference) - 6, "text-anchor": "end" }, "predicted");
  }
  svg.classList.toggle("smoothed", Boolean(chart.smoothed));
  svgElement(svg, "path", { class: "raw", d: path(ys, x, y) });
  if (chart.smoothed) svgElement(svg, "path", { class: "smooth", d: path(smooth(ys), x, y) });
  if (chart.dots || numbers.length === 1) ys.forEach((value, i) => value !== null && svgElement(svg, "circle", { class: "dot", r: 3.5, cx: x(i), cy: y(value) }));
  const dot = svgElement(svg, "circle", { class: "dot", r: 4.5, visibility: "hidden" });
  svg.onpointermove = svg.onpointerdown = (event) => {
    const i = nearest(xs, valueAt(event));
    if (ys[i] === null) return tip(event, null);
    for (const [name, value] of Object.entries({ cx: x(i), cy: y(ys[i]), visibility: "visible" })) dot.setAttribute(name, value);
    tip(event, chart.showY(ys[i]), chart.atX(xs[i]));
  };
  svg.onpointerleave = (event) => (dot.setAttribute("visibility", "hidden"), tip(event, null));
}

// An area over time without axes, for a row of a table: values up to `most`, a line `beside` them and a level marked if given.
function drawArea(svg, { xs, ys, beside = [], most, level, height = 34, show }, tip) {
  const width = emptySvg(svg, height);
  const span = xs[xs.length - 1] - xs[0] || 1;
  const x = (i) => ((xs[i] - xs[0]) / span) * width, y = (value) => height - (value / most) * (height - 3);
  svgElement(svg, "rect", { class: "ground", width, height, rx: 3 });
  let begin = 0;
  for (let i = 0; i <= ys.length; i++) {
    if (i < ys.length && ys[i] !== null) continue;
    if (i > begin) {
      const line = path(ys.slice(begin, i), (k) => x(begin + k), y);
      svgElement(svg, "path", { class: "area", d: `${line}L${x(i - 1).toFixed(1)},${height}L${x(begin).toFixed(1)},${height}Z` });
      svgElement(svg, "path", { class: "edge", d: line });
    }
    begin = i + 1;
  }
  if (beside.length) svgElement(svg, "path", { class: "beside", d: path(beside, x, y) });
  if (level != null) svgElement(svg, "line", { class: "reference", x1: 0, x2: width, y1: y(level), y2: y(level) });
  svg.onpointermove = svg.onpointerdown = (event) => {
    const box = svg.getBoundingClientRect(), i = nearest(xs, xs[0] + ((event.clientX - box.left) / box.width) * span);
    const also = beside.length ? `simulated ${show(beside[i])}, ` : "";
    tip(event, ys[i] === null ? null : show(ys[i]), `${also}at ${showSeconds(xs[i])}`);
  };
  svg.onpointerleave = (event) => tip(event, null);
}
