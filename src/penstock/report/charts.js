// What is drawn in SVG: layers coloured by stage, lines over axes, and small areas in tables.

const STAGE_COLOURS = 8; // of colours.css
const stageColour = (stage) => `var(--stage-${stage % STAGE_COLOURS})`;

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

// A line through (xs, ys). `chart` has: xs, ys, xName, showX, showY, and if wanted: reference (a level to hold against),
// marks (moments on the x axis), fromZero, dots, smoothed. `tip(x, text, small)` shows what is pointed at.
function drawChart(svg, chart, tip) {
  const { xs, ys } = chart, numbers = numbersIn(ys);
  const height = numbers.length ? chart.height ?? 240 : 0, width = emptySvg(svg, height);
  svg.onpointermove = svg.onpointerdown = svg.onpointerleave = null;
  if (!numbers.length) return;
  const levels = chart.reference == null ? numbers : [...numbers, chart.reference];
  const vertical = axisOver(levels, height / 55, chart.fromZero);
  const label = (value) => chart.showTick?.(value) ?? value.toLocaleString("en", { minimumFractionDigits: vertical.decimals, maximumFractionDigits: vertical.decimals });
  const box = { left: 16 + 7 * Math.max(label(vertical.low).length, label(vertical.high).length), right: width - 12, top: 12, bottom: height - 42 };
  const first = xs[0], span = xs[xs.length - 1] - first;
  const xOf = (value) => span > 0 ? box.left + ((value - first) / span) * (box.right - box.left) : (box.left + box.right) / 2;
  const x = (i) => xOf(xs[i]);
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
    const along = (event.clientX - svg.getBoundingClientRect().left - box.left) / (box.right - box.left);
    const i = nearest(xs, first + along * span);
    if (ys[i] === null) return tip(event, null);
    for (const [name, value] of Object.entries({ cx: x(i), cy: y(ys[i]), visibility: "visible" })) dot.setAttribute(name, value);
    tip(event, chart.showY(ys[i]), chart.atX(xs[i]));
  };
  svg.onpointerleave = (event) => (dot.setAttribute("visibility", "hidden"), tip(event, null));
}

// An area over time without axes, for a row of a table: values up to `most`, a level marked if given.
function drawArea(svg, { xs, ys, most, level, show }, tip) {
  const height = 34, width = emptySvg(svg, height);
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
  if (level != null) svgElement(svg, "line", { class: "reference", x1: 0, x2: width, y1: y(level), y2: y(level) });
  svg.onpointermove = svg.onpointerdown = (event) => {
    const box = svg.getBoundingClientRect(), i = nearest(xs, xs[0] + ((event.clientX - box.left) / box.width) * span);
    tip(event, ys[i] === null ? null : show(ys[i]), `at ${showSeconds(xs[i])}`);
  };
  svg.onpointerleave = (event) => tip(event, null);
}
