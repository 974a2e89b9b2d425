// Puts the content into the page. Text goes in as text, never as markup.

window.addEventListener("error", (event) => {
  const box = document.getElementById("error");
  box.textContent = `This report could not be drawn in full: ${event.message}`;
  box.hidden = false;
  document.documentElement.dataset.error = event.message;
});

const content = JSON.parse(document.getElementById("content").textContent);
const byId = (id) => document.getElementById(id);
const MISSING = "–";
const percent = (share) => `${(share * 100).toFixed(1)} %`;
const orMissing = (show) => (value) => (value === null ? MISSING : show(value));
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// ---- tooltip

const tooltip = byId("tooltip");

function showTooltip(event, text, small) {
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

// ---- title and key figures

function fillHeader() {
  const { model, schedule, cluster, plan, traces, batch_size, microbatches } = content;
  byId("model").textContent = model;
  const batch = microbatches > 1 ? `minibatches of ${batch_size} in ${microbatches} microbatches` : `minibatches of ${batch_size}`;
  byId("lead").textContent =
    `${schedule} schedule on ${cluster} · ${plural(plan.stages.length, "stage")} on ${plural(traces[0].workers.length, "worker")} · ${batch}`;
}

function tile(name, value, unit, aside) {
  const number = element("div", "value", value);
  if (unit && value !== MISSING) number.append(element("span", "unit", unit));
  return element("div", "tile", element("div", "name", name), number, element("div", "aside", aside.replace(/(\d) (?=\S)/g, "$1\u00a0")));
}

function ratioInWords(ratio) {
  if (ratio === null) return "";
  const off = Math.round((ratio - 1) * 100);
  return off === 0 ? "as predicted" : `${Math.abs(off)} % ${off > 0 ? "faster" : "slower"} than predicted`;
}

function fillFigures() {
  const { samples_per_s: rate, minibatch_s, utilisation } = content.comparison, { loss, plan, traces } = content;
  const kinds = content.device_kinds.join(", ");
  byId("figures").append(
    tile("Measured", significant(rate.measured), "samples/s", `${plural(content.samples, "sample")} in ${showSeconds(content.seconds)}`),
    tile("Predicted", significant(rate.predicted), "samples/s", minibatch_s.predicted === null ? "" : `${showSeconds(minibatch_s.predicted)} per minibatch`),
    tile("Measured / predicted", orMissing((ratio) => ratio.toFixed(2))(rate.ratio), "", ratioInWords(rate.ratio)),
    tile("Mean utilisation", (utilisation.measured * 100).toFixed(1), "%", `${percent(utilisation.predicted)} predicted`),
    tile("Final loss", orMissing((value) => significant(value, 4))(loss.final), "", loss.first === null ? "" : `${significant(loss.first, 4)} at first`),
    tile("Workers", String(traces[0].workers.length), "", kinds || plural(plan.stages.length, "stage")),
  );
}

// ---- timeline

function startTimeline() {
  const names = content.traces.map((trace) => trace.workers.map((worker) => worker.name));
  const timeline = new Timeline(byId("timeline"), content.traces, ({ from, to, total, crowded }) => {
    byId("timeline-view").textContent = `${showSeconds(from)} to ${showSeconds(to)} of ${showSeconds(total)}`;
    byId("timeline-help").textContent = crowded
      ? "Colours fill each column by their share of its time; zoom in for single actions."
      : "Scroll or pinch to zoom, drag to pan, double-click to return.";
  });
  steer(timeline, (spot, event) => {
    if (!spot) return hideTooltip();
    const text = timeline.hit(spot.trace, spot.worker, spot.time, 3 * timeline.secondsPerPixel);
    showTooltip(event, text, `${names[spot.trace][spot.worker]}, ${timeline.traces[spot.trace].origin}`);
  });
  const buttons = {
    "zoom-in": () => timeline.zoom(1.6), "zoom-out": () => timeline.zoom(1 / 1.6),
    reset: () => timeline.reset(), "show-all": () => timeline.showAll(),
  };
  for (const [id, press] of Object.entries(buttons)) byId(id).addEventListener("click", press);
  for (const kind of Object.keys(KINDS).filter((kind) => timeline.kinds.has(kind))) {
    const swatch = element("span", "swatch");
    swatch.style.background = `linear-gradient(90deg, var(--${kind}) 50%, var(--${kind}-odd) 50%)`;
    byId("legend").append(element("li", "", swatch, KINDS[kind].name));
  }
  const idle = element("span", "swatch");
  idle.style.background = "var(--track)";
  byId("legend").append(element("li", "", idle, "Idle"));
  for (const { origin, events, shown } of content.traces) {
    if (shown === events) continue;
    const text = `The ${origin} timeline stops after ${shown.toLocaleString("en")} of ${events.toLocaleString("en")} actions; the figures count all.`;
    byId("timeline").before(element("p", "note", text));
  }
  return timeline;
}

// ---- tables

function table(className, head, rows) {
  const made = element("table", className, element("thead", "", ...head));
  made.append(element("tbody", "", ...rows));
  return made;
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
  const off = Math.abs(ratio - 1) > 0.1;
  const verdict = !off ? "" : ratio > 1 === moreIsBetter ? "better" : "worse";
  return element("td", "ratio", element("span", verdict, ratio.toFixed(2)));
}

function compared({ predicted, measured, ratio }, show, moreIsBetter) {
  return [cell(orMissing(show)(predicted), "group quiet"), cell(orMissing(show)(measured)), ratioCell(ratio, moreIsBetter)];
}

function fillComparison() {
  const { samples_per_s, minibatch_s, utilisation, kinds, workers } = content.comparison;
  const columns = () => [heading("predicted", { className: "group" }), heading("measured"), heading("ratio")];
  byId("overall").append(table("narrow", [row(heading("Whole pipeline"), ...columns())], [
    row(rowHeading("Samples per second"), ...compared(samples_per_s, significant, true)),
    row(rowHeading("Time per minibatch"), ...compared(minibatch_s, showSeconds, false)),
    row(rowHeading("Mean utilisation"), ...compared(utilisation, percent, true)),
  ]));
  const groups = ["Utilisation", ...kinds.map((kind) => KINDS[kind]?.name ?? kind)];
  const head = [
    row(heading("Worker", { tall: 2 }), ...groups.map((name) => heading(name, { span: 3, className: "group" }))),
    row(...groups.flatMap(columns)),
  ];
  if (kinds.includes("SYNC")) byId("comparison-note").append(" A sync includes the wait for the last to join it.");
  byId("workers").append(table("dense", head, workers.map((worker) => row(
    workerHeading(worker.name),
    ...compared(worker.utilisation, percent, true),
    ...kinds.flatMap((kind) => compared(worker.seconds[kind], showSeconds, false)),
  ))));
}

function fillPlan() {
  const { stages, minibatch_s, gap, data_parallel_s, one_device_s } = content.plan;
  const facts = [`Predicted ${showSeconds(minibatch_s)} per minibatch, ${percent(gap)} above the proven lower bound`];
  if (data_parallel_s !== null) facts.push(`plain data parallelism would take ${showSeconds(data_parallel_s)}`);
  if (one_device_s !== null) facts.push(`one device ${showSeconds(one_device_s)}`);
  byId("plan-note").textContent = `${facts.join("; ")}.`;
  const names = [
    "Stage", "Layers", "Devices", "In flight", "Parameters", "Memory", "Receives", "Sends", "Forward", "Backward", "Per microbatch",
  ];
  const head = row(...names.map((name) => heading(name, { className: name === "Layers" ? "text" : "" })));
  byId("stages").append(table("dense", [head], stages.map((stage, index) => {
    const chip = element("span", "chip");
    chip.style.background = stageColour(index);
    const badge = stage.bottleneck ? [element("span", "badge", stage.bottleneck)] : [];
    const share = stage.memory_share === null ? "" : ` (${Math.round(stage.memory_share * 100)} %)`;
    return row(
      rowHeading(chip, String(index), ...badge),
      cell(stage.layers > 1 ? `${stage.first} … ${stage.last} (${stage.layers})` : stage.first, "text wrap"),
      cell(stage.devices), cell(String(stage.in_flight)),
      cell(showBytes(stage.parameter_bytes)), cell(`${showBytes(stage.memory_bytes)}${share}`),
      cell(showBytes(stage.input_bytes)), cell(`${showBytes(stage.output_bytes)}${stage.sends === "exact" ? "" : ` ${stage.sends}`}`),
      cell(showSeconds(stage.forward_s)), cell(showSeconds(stage.backward_s)), cell(showSeconds(stage.microbatch_s)),
    );
  })));
}

function fillCompression() {
  const errors = content.compression;
  byId("compression-card").hidden = errors.length === 0;
  const names = ["Edge", "What", "Sent in", "Relative error", "Messages looked at"];
  byId("compression").append(table("narrow", [row(...names.map((name) => heading(name)))], errors.map((edge) => row(
    rowHeading(`Stage ${edge.source} to ${edge.target}`),
    cell(edge.direction === "forward" ? "values" : "gradients"), cell(edge.sends),
    cell(orMissing((error) => significant(error, 3))(edge.error)), cell(String(edge.looked_at)),
  ))));
}

// ---- staleness

// A bar for each number of updates, as long as its share of the microbatches.
function shares(microbatches) {
  const total = microbatches.reduce((sum, count) => sum + count);
  return microbatches.flatMap((count, updates) => {
    if (!count) return [];
    const bar = element("span", "share");
    bar.style.width = `${(count / total) * 100}px`;
    return [element("div", "shares", `${updates}: `, bar, ` ${count.toLocaleString("en")}`)];
  });
}

function fillStaleness() {
  const stages = content.staleness;
  byId("staleness-card").hidden = stages.length === 0;
  const names = ["Stage", "Predicted mean", "Measured mean", "Most", "Microbatches by updates"];
  const head = row(...names.map((name, index) => heading(name, { className: index === 4 ? "text" : "" })));
  byId("staleness").append(table("narrow", [head], stages.map((stage, index) => row(
    rowHeading(String(index)), cell(stage.predicted.toFixed(2), "quiet"), cell(stage.measured.toFixed(2)), cell(String(stage.most)),
    element("td", "text", ...shares(stage.microbatches)),
  ))));
}

// ---- loss

function fillLossNote() {
  const { minibatches, every, points } = content.loss;
  const parts = [minibatches ? "Of each minibatch, a mean over its samples" : "No loss was recorded"];
  if (every > 1) parts.push(`each point is the mean of ${every}`);
  if (points.length > 50) parts.push("the bold line is a moving average");
  if (points.includes(null)) parts.push("gaps are values that were not finite");
  byId("loss-note").textContent = `${parts.join("; ")}.`;
}

function drawCharts() {
  drawLayers(byId("layers"), content.plan.layers, tip);
  const svg = byId("loss");
  drawLoss(svg, content.loss, (pick) => {
    svg.onpointermove = svg.onpointerdown = (event) => {
      const found = pick(event.clientX - svg.getBoundingClientRect().left);
      showTooltip(event, found && `loss ${significant(found.loss, 4)}`, found && `minibatch ${found.minibatch}`);
    };
    svg.onpointerleave = () => (pick(null), hideTooltip());
  });
}

// ---- all of it

fillHeader();
fillFigures();
fillComparison();
fillPlan();
fillCompression();
fillStaleness();
fillLossNote();
tipTitles(document.querySelector(".plan"));
scrollToFirstBlock(document.querySelector(".drawing"));
byId("footer").textContent = `Written by Penstock ${content.version}. This page is complete in itself and loads nothing.`;
drawCharts();
const timeline = startTimeline();
timeline.draw();

let lastWidth = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === lastWidth) return;
  lastWidth = document.body.clientWidth;
  timeline.layOut();
  timeline.draw();
  drawCharts();
}).observe(document.body);
for (const query of ["(prefers-color-scheme: dark)", `(resolution: ${window.devicePixelRatio}dppx)`])
  window.matchMedia(query).addEventListener("change", () => (timeline.layOut(), timeline.draw()));
document.addEventListener("scroll", hideTooltip, { passive: true, capture: true }); // of the boxes that scroll too

// What a test, or a curious reader at the console, can ask of the page.
window.penstock = {
  visible: () => timeline.visible(),
  zoom: (factor) => timeline.zoom(factor),
  showAll: () => timeline.showAll(),
  hit: (trace, worker, time_s) => timeline.hit(trace, worker, time_s),
};
document.documentElement.dataset.ready = "true";
