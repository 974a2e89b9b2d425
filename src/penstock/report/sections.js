// What the page says below the timeline: a list of sections, each shown only if the run has something to say there.
// A section has a title and `fill(card)`, which puts in what is to be seen and may return a function that draws it again
// for another width; and if wanted a note, and `has()`.

// ---- drawings of a section

function chartIn(card, name, chart) {
  const svg = svgIn(card, "chart", inWords(name, chart.ys, chart.showY));
  return () => drawChart(svg, chart, showTooltip);
}

// ---- what workers do with their time

const USES = [["compute", "Computing"], ["sync", "Syncing"], ["idle", "Bubble"]];

function uses(worker, which) {
  const compute = worker.utilisation[which], sync = worker.syncing[which];
  return { compute, sync, idle: Math.max(0, 1 - compute - sync) };
}

function useBar(shares) {
  const bar = element("div", "uses");
  bar.role = "img";
  bar.ariaLabel = USES.map(([use, name]) => `${name} ${percent(shares[use])}`).join(", ");
  for (const [use, name] of USES) {
    const part = element("span", use);
    part.style.width = `${shares[use] * 100}%`;
    tip(part, `${name} ${percent(shares[use])}`, "");
    bar.append(part);
  }
  return element("td", "bar", bar);
}

function fillUses(card) {
  const { workers } = content.comparison, { course } = content;
  const legend = element("ul", "legend");
  const syncs = content.comparison.kinds.includes("SYNC");
  for (const [use, name] of USES.filter(([use]) => use !== "sync" || syncs)) legend.append(element("li", "", element("span", `swatch ${use}`), name));
  card.append(legend);
  const draw = [];
  const head = ["Worker", "Measured", "Bubble", "Simulated", "Simulated bubble", ...(course ? ["Computing over time"] : [])];
  const rows = workers.map((worker, i) => {
    const [measured, predicted] = [uses(worker, "measured"), uses(worker, "predicted")];
    const cells = [useBar(measured), cell(percent(measured.idle)), useBar(predicted), cell(percent(predicted.idle), "quiet")];
    if (course) {
      const over = element("td", "bar"), ys = course.busy[i];
      const svg = svgIn(over, "small", inWords("Share of time computing", ys, percent));
      draw.push(() => drawArea(svg, { xs: course.at_s, ys, most: 1, show: percent }, showTooltip));
      cells.push(over);
    }
    return row(workerHeading(worker.name), ...cells);
  });
  card.append(scrolling("What each worker does with its time", table("", [row(...head.map((name) => heading(name)))], rows)));
  return () => draw.forEach((each) => each());
}

// ---- predicted against measured

function fillComparison(card) {
  const { samples_per_s, minibatch_s, utilisation, kinds, workers } = content.comparison;
  const columns = () => [heading("predicted", { className: "group" }), heading("measured"), heading("ratio")];
  card.append(scrolling("Whole pipeline", table("narrow compared", [row(heading("Whole pipeline"), ...columns())], [
    row(rowHeading("Samples per second"), ...compared(samples_per_s, significant, true)),
    row(rowHeading("Time per minibatch"), ...compared(minibatch_s, showSeconds, false)),
    row(rowHeading("Mean utilisation"), ...compared(utilisation, percent, true)),
  ])));
  card.append(element("p", "note phone", "From left to right: predicted, measured, ratio."));
  const groups = kinds.map((kind) => KINDS[kind]?.name ?? kind);
  const head = [
    row(heading("Worker", { tall: 2 }), ...groups.map((name) => heading(name, { span: 3, className: "group" }))),
    row(...groups.flatMap(columns)),
  ];
  card.append(scrolling("By worker", table("dense compared by-kind", head, workers.map((worker) => row(
    workerHeading(worker.name), ...kinds.flatMap((kind) => compared(worker.seconds[kind], showSeconds, false)),
  )))));
}

const comparisonNote = () => [
  "The ratio is measured divided by predicted. Seconds are medians over the run.",
  ...(content.comparison.kinds.includes("SYNC") ? ["A sync includes the wait for the last to join it."] : []),
].join(" ");

// ---- over time

const overTime = (ys, more) => ({
  xs: content.course.at_s, ys, marks: content.marks, xName: "time", showX: showTick, atX: (x) => `at ${showSeconds(x)}`, fromZero: true, ...more,
});

function fillThroughput(card) {
  const { samples_per_s, predicted } = content.course;
  return chartIn(card, "Samples per second", overTime(samples_per_s, { reference: predicted.samples_per_s, showY: (y) => `${significant(y)} samples/s` }));
}

function fillMemory(card) {
  const { at_s, memory_bytes, simulated_bytes, predicted } = content.course, draw = [];
  const peaks = memory_bytes.map((ys) => Math.max(0, ...numbersIn(ys)));
  const most = Math.max(...peaks, ...simulated_bytes.flat(), ...predicted.memory_bytes) * 1.05;
  const legend = element("ul", "legend");
  for (const [kind, name] of [["area", "Measured"], ["line", "Simulated"], ["dashes", "Predicted peak"]]) legend.append(element("li", "", element("span", `swatch ${kind}`), name));
  card.append(legend);
  const rows = memory_bytes.map((ys, worker) => {
    const over = element("td", "bar wide"), level = predicted.memory_bytes[worker], peak = peaks[worker] || null, beside = simulated_bytes[worker] ?? [];
    const svg = svgIn(over, "small", `${inWords("Memory", ys, showBytes)}; ${inWords("simulated", beside, showBytes)}`);
    draw.push(() => drawArea(svg, { xs: at_s, ys, beside, most, level, height: 56, show: showBytes }, showTooltip));
    const ratio = peak && level ? peak / level : null;
    return row(workerHeading(content.comparison.workers[worker].name), over, cell(showBytes(level), "quiet"), cell(orMissing(showBytes)(peak)), ratioCell(ratio, false));
  });
  const names = ["Worker", "Over time", "Predicted peak", "Measured peak", "Ratio"];
  card.append(scrolling("Memory of each worker", table("", [row(...names.map((name) => heading(name)))], rows)));
  return () => draw.forEach((each) => each());
}

// ---- loss and evaluations

function lossNote() {
  const { minibatches, every, points } = content.loss;
  const parts = [minibatches ? "Of each minibatch, a mean over its samples" : "No loss was recorded"];
  if (every > 1) parts.push(`each point is the mean of ${every}`);
  if (points.length > 50) parts.push("the bold line is a moving average");
  if (points.includes(null)) parts.push("gaps are values that were not finite");
  return `${parts.join("; ")}.`;
}

function fillLoss(card) {
  const { points, every, minibatches } = content.loss;
  // A point stands for the minibatches up to it: the first is at minibatch 1, or `every`.
  const xs = points.map((_, i) => Math.min((i + 1) * every, minibatches));
  return chartIn(card, "Loss", {
    xs, ys: points, xName: "minibatch", whole: true, showX: whole, atX: (x) => `minibatch ${whole(x)}`, showY: (y) => `loss ${significant(y, 4)}`,
    smoothed: points.length > 50, height: 280,
  });
}

function fillEvaluations(card) {
  const found = content.evaluations, names = Object.keys(found[0].values), grid = element("div", "charts");
  card.append(grid);
  const draws = names.map((name) => {
    const box = element("figure", "", element("figcaption", "", name));
    grid.append(box);
    return chartIn(box, name, {
      xs: found.map((each) => each.steps), ys: found.map((each) => each.values[name] ?? null), dots: found.length < 60, whole: true, height: 200,
      xName: "minibatches trained", showX: whole, atX: (x) => `after ${plural(x, "minibatch")}`, showY: (y) => `${name} ${significant(y, 4)}`,
    });
  });
  return () => draws.forEach((draw) => draw());
}

// ---- plan

function planNote() {
  const { minibatch_s, gap, data_parallel_s, one_device_s } = content.plan;
  const facts = [`Predicted ${showSeconds(minibatch_s)} per minibatch, ${percent(gap)} above the proven lower bound`];
  if (data_parallel_s !== null) facts.push(`plain data parallelism would take ${showSeconds(data_parallel_s)}`);
  if (one_device_s !== null) facts.push(`one device ${showSeconds(one_device_s)}`);
  return `${facts.join("; ")}. Each layer below is as wide as its forward and backward take.`;
}

function fillPlan(card) {
  const { stages, layers } = content.plan;
  const strip = svgIn(card, "layers", `The layers in order, coloured by stage: ${stages.map((stage, i) => `stage ${i} has ${stage.layers}`).join(", ")}`);
  const names = [
    "Stage", "Layers", "Devices", "In flight", "Parameters", "Memory", "Receives", "Sends", "Forward", "Backward", "Per microbatch",
  ];
  const head = row(...names.map((name) => heading(name, { className: name === "Layers" ? "text" : "" })));
  card.append(scrolling("Stages", table("dense", [head], stages.map((stage, index) => {
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
  }))));
  return () => drawLayers(strip, layers, tip);
}

function fillGraph(card) {
  const box = scrolling("Layer graph", byId("drawing").content);
  box.className = "drawing";
  card.append(box);
  tipTitles(box);
  scrollToFirstBlock(box);
}

// ---- staleness and compression

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

function fillStaleness(card) {
  const names = ["Stage", "Predicted mean", "Measured mean", "Most", "Microbatches by updates"];
  const head = row(...names.map((name, index) => heading(name, { className: index === 4 ? "text" : "" })));
  card.append(scrolling("Staleness by stage", table("narrow", [head], content.staleness.map((stage, index) => row(
    rowHeading(String(index)), cell(stage.predicted.toFixed(2), "quiet"), cell(stage.measured.toFixed(2)), cell(String(stage.most)),
    element("td", "text", ...shares(stage.microbatches)),
  )))));
}

function fillCompression(card) {
  const names = ["Edge", "What", "Sent in", "Relative error", "Messages looked at"];
  card.append(scrolling("Compressed edges", table("narrow", [row(...names.map((name) => heading(name)))], content.compression.map((edge) => row(
    rowHeading(`Stage ${edge.source} to ${edge.target}`),
    cell(edge.direction === "forward" ? "values" : "gradients"), cell(edge.sends),
    cell(orMissing((error) => significant(error, 3))(edge.error)), cell(String(edge.looked_at)),
  )))));
}

// ---- what happened

function fillMarks(card) {
  const head = row(heading("Time"), heading("What", { className: "text" }), heading("", { className: "text" }));
  const made = table("narrow", [head], content.marks.map((mark) => row(rowHeading(showSeconds(mark.at_s, 4)), cell(mark.kind, "text"), cell(mark.text, "text wrap"))));
  const box = scrolling("What happened", made);
  box.classList.add("tall");
  card.append(box);
}

// ---- clocks

function fillClocks(card) {
  const names = ["Workers", "Drift", "Error at most"];
  card.append(scrolling("Clocks", table("narrow", [row(...names.map((name) => heading(name)))], content.clocks.map((clock, i) => row(
    rowHeading(clock.workers.join(", ")),
    cell(i ? `${significant(clock.drift * 1e6)} µs per second` : "the reference", i ? "" : "quiet"), cell(i ? showSeconds(clock.error_s) : MISSING, i ? "" : "quiet"),
  )))));
}

const SECTIONS = [
  {
    id: "uses", title: "Utilisation and bubble", fill: fillUses,
    note: "How each worker spent the time from the first action to the last: computing, synchronising with others, or idle, which is the pipeline's bubble.",
  },
  { id: "comparison", title: "Predicted against measured", note: comparisonNote, fill: fillComparison },
  { id: "throughput", title: "Throughput", has: () => content.course, fill: fillThroughput, note: "Samples per second as the run went on; vertical lines are evaluations, checkpoints and the like." },
  { id: "loss", title: "Loss", note: lossNote, fill: fillLoss },
  { id: "evaluations", title: "Evaluations", has: () => content.evaluations.length, fill: fillEvaluations, note: "Means over the held-out samples." },
  {
    id: "memory", title: "Memory", has: () => content.course?.memory_bytes.some((ys) => numbersIn(ys).length), fill: fillMemory,
    note: "What each worker's tensors took, the most seen at a time, copies for checkpoints included. The simulated line has the same minibatch at the same place.",
  },
  { id: "plan", title: "Plan", note: planNote, fill: fillPlan },
  {
    id: "graph", title: "Layer graph", fill: fillGraph,
    note: "The model, stage by stage. A box holds layers that only feed each other in turn, or equal blocks that follow each other, with their number. Point at anything for its figures.",
  },
  {
    id: "staleness", title: "Staleness", has: () => content.staleness.length, fill: fillStaleness,
    note: "Updates that a stage's weights have seen between a microbatch's forward and the update with its gradient. Predicted for the full pipeline; measured while it fills too.",
  },
  {
    id: "compression", title: "Lost by compression", has: () => content.compression.length, fill: fillCompression,
    note: "The norm of what rounding lost on the way between workers, divided by the norm of what was sent; means over messages.",
  },
  {
    id: "clocks", title: "Clocks", has: () => content.clocks.length > 1, fill: fillClocks,
    note: "Each machine has a clock of its own. Times are those of the first worker's, by round trips at the start and at the end; the error is half the quickest.",
  },
  { id: "marks", title: "What happened when", has: () => content.marks.length, fill: fillMarks },
];

// Puts in all that have something to say; returns what draws them again.
function fillSections(place) {
  const draws = [];
  for (const { id, title, note, has, fill } of SECTIONS) {
    if (has && !has()) continue;
    const text = typeof note === "function" ? note() : note, name = element("h2", "", title);
    const card = element("section", "card", name, ...(text ? [element("p", "note", text)] : []));
    name.id = `${id}-title`;
    card.id = id;
    card.setAttribute("aria-labelledby", name.id);
    place.append(card);
    draws.push(fill(card) ?? (() => {}));
  }
  return () => draws.forEach((draw) => draw());
}
