// Runs side by side. A run has one colour everywhere.

const LINE_COLOURS = ["F", "bad", "good", "SYNC", "B", "muted"];
const lineColour = (run) => `var(--${LINE_COLOURS[run % LINE_COLOURS.length]})`;

function named(run) {
  const dot = element("span", "chip");
  dot.style.background = lineColour(run);
  return [dot, content.runs[run].name];
}

// ---- tables: a row for each figure, a column for each run

function runsTable(label, rows) {
  const names = content.runs.map(({ name }, run) => {
    const made = heading("", { className: "text wrap" });
    made.append(...named(run));
    return made;
  });
  const made = table("runs", [row(heading(""), ...names)], rows.map(({ what, values }) => row(
    rowHeading(what), ...values.map((value) => cell(value, "text wrap")),
  )));
  return scrolling(label, made);
}

// ---- curves

function linesIn(card, name, chart) {
  const svg = svgIn(card, "chart", `${name} of ${chart.lines.map((line) => line.name).join(", ")}`);
  return () => drawLines(svg, chart, showTooltip);
}

const lines = (xsOf, ysOf) => content.runs.map((run, i) => ({ name: run.name, colour: lineColour(i), xs: xsOf(run), ys: ysOf(run) }));
const overTime = { xName: "time", showX: showTick, atX: (x) => `at ${showSeconds(x)}` };
const withCourse = (ysOf) => lines((run) => run.course?.at_s ?? [], (run) => (run.course ? ysOf(run.course) : []));
const showLoss = (y) => significant(y, 4);

const CHARTS = [
  {
    id: "loss", title: "Loss by samples", note: "Moving averages, of the same samples at the same place.",
    smoothed: true, xName: "samples", whole: true, showX: whole, atX: (x) => `after ${whole(x)} samples`, showY: showLoss,
    lines: lines(
      ({ loss, batch_size }) => loss.points.map((_, i) => Math.min((i + 1) * loss.every, loss.minibatches) * batch_size),
      ({ loss }) => loss.points,
    ),
  },
  { id: "loss-over-time", title: "Loss over time", smoothed: true, ...overTime, showY: showLoss, lines: withCourse((course) => course.loss) },
  {
    id: "throughput", title: "Throughput", smoothed: true, ...overTime, fromZero: true, showY: (y) => `${significant(y)} samples/s`,
    note: "Samples per second as each run went on.", lines: withCourse((course) => course.samples_per_s),
  },
  {
    id: "memory", title: "Memory", ...overTime, fromZero: true, showTick: showBytes, showY: showBytes,
    note: "What the worker with the most held, as each run went on.",
    lines: withCourse(({ at_s, memory_bytes }) => at_s.map((_, i) => Math.max(0, ...memory_bytes.map((ys) => ys[i] ?? 0)) || null)),
  },
];

// ---- all of it

function section(id, title, note) {
  const name = element("h2", "", title), card = element("section", "card", name, ...(note ? [element("p", "note", note)] : []));
  name.id = `${id}-title`;
  card.id = id;
  card.setAttribute("aria-labelledby", name.id);
  byId("sections").append(card);
  return card;
}

byId("runs").textContent = content.runs.map(({ name }) => name).join(" · ");
byId("verdicts").append(...content.runs.map(({ verdict }, run) => element("li", "", element("strong", "", ...named(run)), `: ${verdict}`)));
section("figures", "Figures", "Memory is that of the worker with the most; the final loss is a mean over the last 20 minibatches.").append(runsTable("Figures", content.figures));
const plans = section("differences", "What differs between the plans", content.differences.length ? "" : "Nothing: the plans are the same.");
if (content.differences.length) plans.append(runsTable("Differences", content.differences));
const drawn = CHARTS.filter((chart) => chart.lines.some(({ ys }) => numbersIn(ys).length));
const draws = drawn.map((chart) => linesIn(section(chart.id, chart.title, chart.note), chart.title, chart));
const drawAll = () => draws.forEach((draw) => draw());
drawAll();
byId("footer").textContent = `Written by Penstock ${content.version}. This page is complete in itself and loads nothing.`;

let lastWidth = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth === lastWidth) return;
  lastWidth = document.body.clientWidth;
  drawAll();
}).observe(document.body);
document.addEventListener("scroll", hideTooltip, { passive: true, capture: true });
document.documentElement.dataset.ready = "true";
