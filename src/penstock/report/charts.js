// The two drawings in SVG: the layers coloured by stage, and the loss curve.

const STAGE_COLOURS = 8; // of colours.css
const stageColour = (stage) => `var(--stage-${stage % STAGE_COLOURS})`;

function svgElement(parent, tag, attributes, text) {
  const element = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function emptySvg(svg, height) {
  const width = Math.max(160, svg.clientWidth);
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
function path(points, x, y) {
  let pen = "M";
  return points.map((value, i) => {
    if (value === null) return (pen = "M"), "";
    const step = `${pen}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
    return step;
  }).join("");
}

function drawLoss(svg, loss, point) {
  const { points, every } = loss, numbers = points.filter((value) => value !== null);
  const height = numbers.length ? 280 : 0, width = emptySvg(svg, height);
  if (!numbers.length) return;
  const smallest = Math.min(...numbers), largest = Math.max(...numbers);
  const range = largest - smallest || Math.abs(largest) || 1;
  const step = tickStep(range * 1.05, 5), low = Math.floor(smallest / step) * step, high = Math.ceil(largest / step + 1e-9) * step;
  const decimals = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  const box = { left: 16 + 7 * Math.max(...[low, high].map((value) => value.toFixed(decimals).length)), right: width - 10, top: 10, bottom: height - 40 };
  // A point stands for the minibatches up to it: the first is at minibatch 1, or `every`.
  const number = (i) => Math.min((i + 1) * every, loss.minibatches);
  const first = number(0), span = Math.max(1, loss.minibatches - first);
  const xOf = (minibatch) => points.length > 1 ? box.left + ((minibatch - first) / span) * (box.right - box.left) : (box.left + box.right) / 2;
  const x = (i) => xOf(number(i));
  const y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
  for (let n = 0; low + n * step <= high + step / 2; n++) {
    const value = low + n * step;
    svgElement(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) });
    svgElement(svg, "text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(decimals));
  }
  const tick = Math.max(1, tickStep(span, (box.right - box.left) / 110));
  for (let n = Math.ceil(first / tick) * tick; n <= loss.minibatches; n += tick)
    svgElement(svg, "text", { x: xOf(n), y: box.bottom + 18, "text-anchor": "middle" }, n.toLocaleString("en"));
  svgElement(svg, "text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, "minibatch");
  const overlay = points.length > 50;
  svg.classList.toggle("smoothed", overlay);
  svgElement(svg, "path", { class: "raw", d: path(points, x, y) });
  if (overlay) svgElement(svg, "path", { class: "smooth", d: path(smooth(points), x, y) });
  const dot = svgElement(svg, "circle", { class: "dot", r: 3.5, visibility: points.length > 1 ? "hidden" : "visible", cx: x(0), cy: y(numbers[0]) });
  point((px) => {
    if (px === null) return points.length > 1 && dot.setAttribute("visibility", "hidden"), null;
    const minibatch = first + ((px - box.left) / (box.right - box.left)) * span;
    const i = Math.max(0, Math.min(points.length - 1, Math.round(minibatch / every) - 1));
    if (points[i] === null) return null;
    for (const [name, value] of Object.entries({ cx: x(i), cy: y(points[i]), visibility: "visible" })) dot.setAttribute(name, value);
    return { minibatch: number(i), loss: points[i] };
  });
}
