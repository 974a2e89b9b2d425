// The page as a whole: title, key figures, timeline and sections.

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
  byId("verdict").textContent = content.headline;
  byId("explanation").textContent = content.comparison.explanation;
}

// ---- timeline

// What copies or saves the view as a PNG. `legend` has names and colours.
function imageOf(timeline, legend) {
  const tell = (text) => { byId("timeline-told").textContent = text; };
  const png = () => new Promise((done) => {
    timeline.picture(content.model, `${byId("lead").textContent}. ${content.headline}`, legend).toBlob(done, "image/png");
  });
  const save = async () => {
    const link = element("a"), url = URL.createObjectURL(await png());
    Object.assign(link, { href: url, download: "penstock-timeline.png" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
    tell("Image saved as penstock-timeline.png.");
  };
  const copy = async () => {
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": png() })]);
      tell("Image copied.");
    } catch {
      await save(); // a browser that keeps its clipboard from pages on a disk
    }
  };
  return { copy, save };
}

function startTimeline() {
  const names = content.traces.map((trace) => trace.workers.map((worker) => worker.name));
  const marks = content.marks.map((mark) => ({ ...mark, at_s: mark.at_s - content.traces[0].origin_s }));
  const timeline = new Timeline(byId("timeline"), content.traces, marks, ({ from, to, total, crowded, traces }) => {
    const moved = traces[1].shift, aligned = moved ? `; simulated drawn ${showSeconds(Math.abs(moved))} ${moved > 0 ? "later" : "earlier"}, to align` : "";
    byId("timeline-view").textContent = `${showSeconds(from)} to ${showSeconds(to)} of ${showSeconds(total)}${aligned}`;
    byId("timeline-help").textContent = crowded
      ? "Colours fill each column by their share of its time; zoom in for single actions."
      : "Scroll or pinch to zoom, drag to pan, double-click to return.";
  });
  steer(timeline, (spot, event) => {
    if (!spot) return hideTooltip();
    const marked = spot.trace === 0 ? timeline.markAt(spot.x) : null;
    if (marked) return showTooltip(event, marked.map((mark) => mark.text).join("; "), `at ${showSeconds(spot.time, 4)}`);
    const text = timeline.hit(spot.trace, spot.worker, spot.time, 3 * timeline.secondsPerPixel);
    showTooltip(event, text, `${names[spot.trace][spot.worker]}, ${timeline.traces[spot.trace].origin}`);
  }, (text) => {
    byId("timeline-chosen").hidden = text === null;
    byId("timeline-chosen").textContent = text ?? "";
  });
  const legend = [], image = imageOf(timeline, legend);
  const buttons = {
    "zoom-in": () => timeline.zoom(1.6), "zoom-out": () => timeline.zoom(1 / 1.6),
    reset: () => timeline.reset(), start: () => timeline.showStart(), "show-all": () => timeline.showAll(),
    "copy-image": image.copy, "save-image": image.save,
  };
  for (const [id, press] of Object.entries(buttons)) byId(id).addEventListener("click", press);
  const explain = (name, background, colour) => {
    const swatch = element("span", "swatch");
    swatch.style.background = background;
    byId("legend").append(element("li", "", swatch, name));
    legend.push([name, colour]);
  };
  for (const kind of Object.keys(KINDS).filter((kind) => timeline.kinds.has(kind)))
    explain(KINDS[kind].name, `linear-gradient(90deg, var(--${kind}) 50%, var(--${kind}-odd) 50%)`, kind);
  explain("Idle", "var(--track)", "track");
  for (const { origin, gap_s } of content.traces) {
    if (gap_s) byId("timeline").before(element("p", "note", `Of the ${origin} timeline only both ends are kept: nothing is shown from ${showSeconds(gap_s[0])} to ${showSeconds(gap_s[1])}.`));
  }
  const { clocks } = content, error_s = Math.max(...clocks.map((clock) => clock.error_s));
  if (clocks.length) byId("timeline-clocks").textContent = clocks.length > 1
    ? `Clocks of ${clocks.length} machines, aligned to within ${showSeconds(error_s)}.`
    : "All workers read one clock.";
  return timeline;
}

// ---- all of it

fillHeader();
fillFigures();
byId("footer").textContent = `Written by Penstock ${content.version}. This page is complete in itself and loads nothing.`;
const drawSections = fillSections(byId("sections"));
drawSections();
const timeline = startTimeline();
timeline.draw();

let lastWidth = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === lastWidth) return;
  lastWidth = document.body.clientWidth;
  timeline.layOut();
  timeline.draw();
  drawSections();
}).observe(document.body);
for (const query of ["(prefers-color-scheme: dark)", `(resolution: ${window.devicePixelRatio}dppx)`])
  window.matchMedia(query).addEventListener("change", () => (timeline.layOut(), timeline.draw()));
document.addEventListener("scroll", hideTooltip, { passive: true, capture: true }); // of the boxes that scroll too

// What a test, or a curious reader at the console, can ask of the page.
window.penstock = {
  visible: () => timeline.visible(),
  zoom: (factor) => timeline.zoom(factor),
  showAll: () => timeline.showAll(),
  shift: () => timeline.traces[1].shift,
  hit: (trace, worker, time_s) => timeline.hit(trace, worker, time_s),
};
document.documentElement.dataset.ready = "true";
