// The timeline: a row of bars for each worker, all on one time axis, on one canvas.

const KINDS = {
  F: { name: "Forward", of: "microbatch" },
  B: { name: "Backward", of: "microbatch" },
  I: { name: "Backward for inputs", of: "microbatch" },
  W: { name: "Backward for weights", of: "microbatch" },
  SYNC: { name: "Sync", of: "round" },
  STEP: { name: "Update", of: "round" },
};
const VIEW_MICROBATCHES = 12; // what a view of the start or of the steady state holds
const CROWDED = 0.6; // bars per pixel beyond which bars would only flicker
const SHARE_PX = 3; // width of the columns that then show shares of time
const AXIS_PX = 24, HEADING_PX = 26, TRACK_PX = 10;

// Typed arrays of one worker's events, in order of start. `reach` is the latest end so far, so that a search finds
// the first visible event even where events overlap.
function unpackWorker({ name, actions, gap_ns, length_ns }) {
  const texts = actions ? actions.split(" ") : [], count = texts.length;
  const row = {
    name, count, kind: new Array(count), stage: new Uint32Array(count), index: new Uint32Array(count),
    start: new Float64Array(count), end: new Float64Array(count), reach: new Float64Array(count),
  };
  let now_ns = 0;
  for (let i = 0; i < count; i++) {
    const [, stage, kind, index] = /^(\d+)([A-Z]+)(\d+)$/.exec(texts[i]);
    row.stage[i] = stage;
    row.kind[i] = kind;
    row.index[i] = index;
    row.start[i] = (now_ns += gap_ns[i]) / 1e9;
    row.end[i] = (now_ns += length_ns[i]) / 1e9;
    row.reach[i] = Math.max(row.end[i], i ? row.reach[i - 1] : 0);
  }
  return row;
}

// The event at a time, or the nearest within `slack` seconds; -1 if there is none.
function eventAt(row, time, slack = 0) {
  let best = -1, distance = slack;
  for (let i = firstAbove(row.start, time + slack) - 1; i >= 0 && row.reach[i] >= time - slack; i--) {
    const away = Math.max(row.start[i] - time, time - row.end[i], 0);
    if (away < distance || (away === 0 && best < 0)) [best, distance] = [i, away];
    if (away === 0) break;
  }
  return best;
}

function describe(row, i) {
  const kind = KINDS[row.kind[i]] ?? { name: row.kind[i], of: "microbatch" };
  const what = `${kind.name.toLowerCase()} of ${kind.of} ${row.index[i]} at stage ${row.stage[i]}`;
  return `${what}, ${showSeconds(row.end[i] - row.start[i])}, starts at ${showSeconds(row.start[i], 4)}`;
}

class Timeline {
  // `onView` hears of every new view, once it is drawn.
  constructor(canvas, traces, marks, onView) {
    this.canvas = canvas;
    this.marks = marks;
    this.chosen = null; // { trace, worker, i }
    this.context = canvas.getContext("2d");
    this.onView = onView;
    // `shift` is where the beginning of a trace stands on the axis, whose zero is the beginning of the measured one.
    this.traces = traces.map((trace) => ({
      origin: trace.origin, gap: trace.gap_s, steady: trace.steady, shift: 0, rows: trace.workers.map(unpackWorker),
    }));
    for (const trace of this.traces) trace.end = Math.max(0, ...trace.rows.map((row) => row.reach[row.count - 1] ?? 0));
    this.align(null);
    const kinds = new Set(this.traces.flatMap(({ rows }) => rows.flatMap((row) => [...new Set(row.kind)])));
    this.kinds = new Set([...Object.keys(KINDS).filter((kind) => kinds.has(kind)), ...kinds]);
    this.layOut();
    this.reset();
  }

  visible() { return [this.from, this.to]; }

  // Where the traces stand: with the moments given of each at one place, or if none are given, both from their beginnings.
  align(moments) {
    for (const [i, trace] of this.traces.entries()) trace.shift = moments ? moments[0] - moments[i] : 0;
    this.begin = Math.min(...this.traces.map(({ shift }) => shift));
    this.total = Math.max(...this.traces.map(({ shift, end }) => shift + end)) - this.begin || 1e-3;
  }

  // The full pipeline: the same microbatch of both traces at the same place, and those after it.
  reset() {
    const steady = this.traces.map((trace) => trace.steady);
    if (steady.includes(null)) return this.showStart();
    this.align(steady.map(({ at_s }) => at_s));
    const [{ microbatch, at_s: begin }] = steady, end = this.endOf(microbatch, microbatch + this.wanted);
    this.show(begin - 0.01 * (end - begin), end);
  }

  // The pipeline as it fills.
  showStart() {
    this.align(null);
    const end = this.endOf(0, this.wanted);
    this.show(0, end && end < 0.9 * this.total ? end : this.total);
  }

  showAll() {
    this.align(null);
    this.show(0, this.total);
  }

  // As many microbatches as a screen of this width can show readably.
  get wanted() { return this.width < 560 ? VIEW_MICROBATCHES / 3 : VIEW_MICROBATCHES; }

  // When the last action of any of these microbatches ends, in either trace.
  endOf(first, after) {
    let end = 0;
    for (const { rows, shift } of this.traces)
      for (const row of rows)
        for (let i = 0; i < row.count; i++)
          if (row.index[i] >= first && row.index[i] < after && KINDS[row.kind[i]]?.of !== "round") end = Math.max(end, row.end[i] + shift);
    return end;
  }

  // A factor above 1 shows less time, in more detail, and keeps the moment `at` where it is.
  zoom(factor, at = (this.from + this.to) / 2) {
    const shortest = Math.min(this.total, Math.max(this.total * 1e-7, 1e-7));
    const span = Math.min(this.total, Math.max(shortest, (this.to - this.from) / factor));
    const from = at - ((at - this.from) * span) / (this.to - this.from);
    this.show(from, from + span);
  }

  pan(seconds) { this.show(this.from + seconds, this.to + seconds); }

  show(from, to) {
    const span = Math.min(to - from, this.total);
    this.from = Math.max(this.begin, Math.min(from, this.begin + this.total - span));
    this.to = this.from + span;
    this.redraw();
  }

  hit(trace, worker, time, slack = 0) {
    const row = this.traces[trace]?.rows[worker];
    const i = row ? eventAt(row, time, slack) : -1;
    return i < 0 ? null : describe(row, i);
  }

  // What lies under a point of the canvas: the trace and worker of that row and the moment.
  locate(x, y) {
    const lane = this.lanes.find(({ top }) => y >= top - 1 && y < top + this.pitch);
    return lane && x >= this.left ? { ...lane, x, time: this.timeAt(x) - this.traces[lane.trace].shift } : null;
  }

  // The moment of a mark within a few pixels, if there is one.
  markAt(x) {
    const near = this.marks.filter((mark) => Math.abs(this.xOf(mark.at_s) - x) < 4);
    return near.length ? near : null;
  }

  // Takes the action at a time (or nearest to it) as the chosen one; null lets go of it.
  choose(trace, worker, time, slack = 0) {
    const row = this.traces[trace]?.rows[worker], i = row ? eventAt(row, time, slack) : -1;
    this.chosen = i < 0 ? null : { trace, worker, i };
    this.redraw();
    return this.describeChosen();
  }

  describeChosen() {
    if (!this.chosen) return null;
    const { trace, worker, i } = this.chosen, { origin, rows } = this.traces[trace];
    return `${rows[worker].name}, ${origin}: ${describe(rows[worker], i)}`;
  }

  // To the next action of the chosen worker, or with `lanes` to the action at the same time of a worker above or below.
  step(actions, lanes) {
    const at = this.chosen ?? { trace: 0, worker: 0, i: -1 };
    const place = this.lanes.findIndex(({ trace, worker }) => trace === at.trace && worker === at.worker);
    const lane = this.lanes[Math.max(0, Math.min(this.lanes.length - 1, place + (this.chosen ? lanes : 0)))];
    if (!lane.row.count) return this.describeChosen();
    const before = this.lanes[place].row, { shift } = this.traces[lane.trace];
    const time = (at.i < 0 ? this.from : before.start[at.i] + this.traces[at.trace].shift) - shift;
    const same = lane.row === before && at.i >= 0;
    const i = same ? at.i + actions : Math.max(0, firstAbove(lane.row.start, time) - 1);
    this.chosen = { trace: lane.trace, worker: lane.worker, i: Math.max(0, Math.min(lane.row.count - 1, i)) };
    const start = lane.row.start[this.chosen.i] + shift, end = lane.row.end[this.chosen.i] + shift;
    if (end > this.to || start < this.from) this.pan((start + end - this.from - this.to) / 2);
    this.redraw();
    return this.describeChosen();
  }

  timeAt(x) { return this.from + ((x - this.left) / (this.width - this.left)) * (this.to - this.from); }
  xOf(time) { return this.left + ((time - this.from) / (this.to - this.from)) * (this.width - this.left); }
  get secondsPerPixel() { return (this.to - this.from) / (this.width - this.left); }

  // Sizes and places of everything; again whenever the width or the colours change.
  layOut(ratio = window.devicePixelRatio || 1) {
    const styles = getComputedStyle(document.documentElement);
    this.colour = (name) => styles.getPropertyValue(`--${name}`);
    this.font = getComputedStyle(document.body).fontFamily;
    this.width = Math.max(160, this.canvas.clientWidth);
    const rows = this.traces.reduce((sum, trace) => sum + trace.rows.length, 0);
    this.pitch = Math.round(Math.max(12, Math.min(30, 660 / rows)));
    this.barHeight = this.pitch - (this.pitch > 18 ? 4 : 2);
    this.context.font = `12px ${this.font}`;
    const labels = this.traces.flatMap(({ rows }) => rows.map((row) => this.context.measureText(this.label(row)).width));
    this.left = Math.round(Math.min(Math.max(...labels) + 14, this.width * 0.34));
    let top = 0;
    this.lanes = this.traces.flatMap(({ rows }, trace) => {
      top += HEADING_PX;
      return rows.map((row, worker) => ({ row, trace, worker, top: (top += this.pitch) - this.pitch }));
    });
    this.bottom = top + 4;
    this.height = this.bottom + AXIS_PX + TRACK_PX;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.palette = {};
    for (const kind of this.kinds) {
      const known = KINDS[kind] ? kind : "other";
      this.palette[kind] = [this.colour(known), this.colour(`${known}-odd`), this.colour(`${known}-ink`)];
    }
  }

  label(row) { return this.width < 560 ? row.name.split(" on ")[0] : row.name; }

  redraw() {
    this.pending ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.pending = undefined;
    const { context } = this;
    context.clearRect(0, 0, this.width, this.height);
    context.textBaseline = "middle";
    this.drawAxis();
    this.crowded = false;
    for (const lane of this.lanes) this.drawLane(lane);
    this.drawMarks();
    this.drawChosen();
    this.drawTrack();
    this.onView(this);
  }

  drawAxis() {
    const { context } = this, step = tickStep(this.to - this.from, (this.width - this.left) / 110);
    const [unit, size] = this.to >= 1 ? ["s", 1] : this.to >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
    const decimals = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    context.font = `11.5px ${this.font}`;
    context.textAlign = "center";
    for (let n = Math.ceil(this.from / step); n * step <= this.to; n++) {
      const x = this.xOf(n * step), text = `${((n * step) / size).toFixed(decimals)} ${unit}`;
      const half = context.measureText(text).width / 2;
      context.fillStyle = this.colour("line");
      context.fillRect(Math.round(x), HEADING_PX, 1, this.bottom - HEADING_PX);
      context.fillStyle = this.colour("muted");
      context.fillText(text, Math.max(this.left + half, Math.min(x, this.width - half)), this.bottom + AXIS_PX / 2);
    }
  }

  drawLane({ row, trace, worker, top }) {
    const { context } = this;
    context.textAlign = "left";
    if (worker === 0) {
      context.font = `600 12.5px ${this.font}`;
      context.fillStyle = this.colour("ink");
      const { origin } = this.traces[trace];
      context.fillText(origin[0].toUpperCase() + origin.slice(1), 0, top - HEADING_PX / 2 + 2);
    }
    context.font = `${Math.min(12, this.pitch - 2)}px ${this.font}`;
    context.fillStyle = this.colour("muted");
    context.fillText(fit(context, this.label(row), this.left - 10), 0, top + this.barHeight / 2);
    context.save();
    context.beginPath();
    context.rect(this.left, top, this.width - this.left, this.barHeight);
    context.clip();
    context.globalAlpha = 0.75; // lets the grid shine through where a worker idles
    context.fillStyle = this.colour("track");
    context.fillRect(this.left, top, this.width - this.left, this.barHeight);
    context.globalAlpha = 1;
    const { gap, shift } = this.traces[trace];
    if (gap) this.drawGap(gap[0] + shift, gap[1] + shift, top);
    const first = firstAbove(row.reach, this.from - shift), last = firstAbove(row.start, this.to - shift);
    if (last - first > CROWDED * (this.width - this.left)) this.drawShares(row, first, last, top, shift);
    else this.drawBars(row, first, last, top, shift);
    context.restore();
  }

  // Slanted lines where nothing is known, which is not the same as idle.
  drawGap(begin, end, top) {
    if (end < this.from || begin > this.to) return;
    const { context } = this, left = Math.max(this.left, this.xOf(begin)), right = Math.min(this.width, this.xOf(end));
    context.strokeStyle = this.colour("line");
    context.lineWidth = 2;
    context.beginPath();
    for (let x = left - (left % 8) - this.pitch; x < right; x += 8) {
      const from = Math.max(x, left), to = Math.min(x + this.barHeight, right);
      if (from >= to) continue;
      context.moveTo(from, top + this.barHeight - (from - x));
      context.lineTo(to, top + this.barHeight - (to - x));
    }
    context.stroke();
  }

  drawBars(row, first, last, top, shift) {
    const { context } = this, height = this.barHeight;
    context.font = `${Math.min(11.5, height - 3)}px ${this.font}`;
    context.textAlign = "center";
    let covered = -1;
    for (let i = first; i < last; i++) {
      const left = Math.max(this.left - 1, this.xOf(row.start[i] + shift)), right = Math.min(this.width + 1, this.xOf(row.end[i] + shift));
      if (right - left < 1 && Math.floor(left) === covered) continue; // its pixel is drawn already
      const [even, odd, ink] = this.palette[row.kind[i]];
      context.fillStyle = row.index[i] % 2 ? odd : even;
      context.fillRect(left, top, Math.max(1, right - left - (right - left > 4 ? 1 : 0)), height);
      covered = Math.floor(right);
      const text = KINDS[row.kind[i]]?.of === "round" ? KINDS[row.kind[i]].name.toLowerCase() : String(row.index[i]);
      if (height >= 10 && right - left > 6 * text.length + 6) {
        context.fillStyle = ink;
        context.fillText(text, (left + right) / 2 - 0.5, top + height / 2 + 0.5);
      }
    }
  }

  // Too many bars to tell apart: each column is filled from below with every kind's share of its time.
  drawShares(row, first, last, top, shift) {
    this.crowded = true;
    const columns = Math.ceil((this.width - this.left) / SHARE_PX), seconds = SHARE_PX * this.secondsPerPixel;
    const shares = {};
    for (const kind of this.kinds) shares[kind] = new Float64Array(columns);
    for (let i = first; i < last; i++) {
      const start = (row.start[i] + shift - this.from) / seconds, end = (row.end[i] + shift - this.from) / seconds;
      const share = shares[row.kind[i]];
      for (let c = Math.max(0, Math.floor(start)); c < Math.min(columns, end); c++)
        share[c] += Math.min(end, c + 1) - Math.max(start, c);
    }
    const base = new Float64Array(columns).fill(top + this.barHeight);
    for (const kind in shares) {
      const next = base.map((y, c) => Math.max(top, y - shares[kind][c] * this.barHeight));
      this.fillBetween(base, next, this.palette[kind][0]);
      base.set(next);
    }
  }

  // One outline for the whole row: far faster than a rectangle for each column.
  fillBetween(lower, upper, colour) {
    const { context, left } = this;
    context.beginPath();
    for (let c = 0; c < upper.length; c++) {
      context.lineTo(left + c * SHARE_PX, upper[c]);
      context.lineTo(left + (c + 1) * SHARE_PX, upper[c]);
    }
    for (let c = lower.length - 1; c >= 0; c--) {
      context.lineTo(left + (c + 1) * SHARE_PX, lower[c]);
      context.lineTo(left + c * SHARE_PX, lower[c]);
    }
    context.fillStyle = colour;
    context.fill();
  }

  // Moments of the run, over the rows that were measured.
  drawMarks() {
    const { context } = this, measured = this.lanes.filter(({ trace }) => trace === 0);
    if (!measured.length) return;
    const top = measured[0].top, bottom = measured[measured.length - 1].top + this.pitch;
    context.fillStyle = this.colour("accent");
    for (const { at_s } of this.marks) {
      if (at_s < this.from || at_s > this.to) continue;
      const x = Math.round(this.xOf(at_s));
      context.fillRect(x, top - 3, 1, bottom - top + 2);
      context.beginPath();
      context.moveTo(x - 4, top - 9);
      context.lineTo(x + 5, top - 9);
      context.lineTo(x + 0.5, top - 2);
      context.fill();
    }
  }

  drawChosen() {
    if (!this.chosen) return;
    const { trace, worker, i } = this.chosen, { context } = this;
    const { row, top } = this.lanes.find((lane) => lane.trace === trace && lane.worker === worker);
    const start = row.start[i] + this.traces[trace].shift, end = row.end[i] + this.traces[trace].shift;
    if (end < this.from || start > this.to) return;
    const left = Math.max(this.left, this.xOf(start)), right = Math.min(this.width, Math.max(left + 3, this.xOf(end)));
    context.strokeStyle = this.colour("card");
    context.lineWidth = 4;
    context.strokeRect(left, top, right - left, this.barHeight);
    context.strokeStyle = this.colour("ink");
    context.lineWidth = 2;
    context.strokeRect(left, top, right - left, this.barHeight);
  }

  // Where in the whole run the view is.
  drawTrack() {
    const { context } = this, top = this.height - TRACK_PX + 2, length = this.width - this.left;
    const pill = (x, width) => {
      context.beginPath();
      context.roundRect(x, top, width, TRACK_PX - 4, 3);
      context.fill();
    };
    context.fillStyle = this.colour("track");
    pill(this.left, length);
    const width = Math.max(8, (length * (this.to - this.from)) / this.total);
    context.fillStyle = this.colour("muted");
    pill(Math.min(this.left + (length * (this.from - this.begin)) / this.total, this.width - width), width);
  }

  // The view as an image of its own: words above, the legend below, at twice the screen's resolution.
  picture(title, text, legend) {
    this.layOut(2);
    this.draw();
    const image = document.createElement("canvas"), context = image.getContext("2d"), pad = 18, line = 17;
    context.font = `13px ${this.font}`;
    const lines = wrapped(context, text, this.width), top = pad + 26 + lines.length * line + 8;
    const rows = this.height - TRACK_PX;
    image.width = 2 * (this.width + 2 * pad);
    image.height = 2 * (top + rows + 24 + pad);
    context.scale(2, 2);
    context.fillStyle = this.colour("card");
    context.fillRect(0, 0, image.width, image.height);
    context.textBaseline = "top";
    context.fillStyle = this.colour("ink");
    context.font = `650 17px ${this.font}`;
    context.fillText(fit(context, title, this.width), pad, pad);
    context.font = `13px ${this.font}`;
    context.fillStyle = this.colour("muted");
    lines.forEach((words, i) => context.fillText(words, pad, pad + 26 + i * line));
    context.drawImage(this.canvas, 0, 0, this.canvas.width, rows * 2, pad, top, this.width, rows);
    let x = pad;
    context.textBaseline = "middle";
    for (const [name, colour] of legend) {
      context.fillStyle = this.colour(colour);
      context.fillRect(x, top + rows + 12, 16, 11);
      context.fillStyle = this.colour("ink");
      context.fillText(name, x + 22, top + rows + 18);
      x += 40 + context.measureText(name).width;
    }
    this.layOut();
    this.draw();
    return image;
  }
}

// The words of a text in lines of this width.
function wrapped(context, text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines[lines.length - 1]} ${word}`.trim();
    if (context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines.filter(Boolean).map((each) => fit(context, each, width));
}

function fit(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return `${text.slice(0, length)}…`;
}

// Wheel, drag, pinch, double click, taps and keys. `onPoint` is told what is pointed at, or null; `onChoose` what is chosen.
function steer(timeline, onPoint, onChoose) {
  const { canvas } = timeline, pointers = new Map();
  let moved = 0, onTrack = false, scrolled_ms = -Infinity;
  // A page on its way past the pointer goes on its way: zooming begins with a wheel that begins here.
  document.addEventListener("scroll", () => { scrolled_ms = performance.now(); }, { passive: true });
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const point = (event) => {
    const { x, y } = place(event);
    onPoint(timeline.locate(x, y), event);
  };
  const seek = (x) => {
    const middle = timeline.begin + ((x - timeline.left) / (timeline.width - timeline.left)) * timeline.total;
    timeline.pan(middle - (timeline.from + timeline.to) / 2);
  };
  canvas.addEventListener("wheel", (event) => {
    if (performance.now() - scrolled_ms < 250) return;
    event.preventDefault();
    const pixels = event.deltaMode === 1 ? 30 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) timeline.pan(event.deltaX * pixels * timeline.secondsPerPixel);
    else timeline.zoom(Math.exp(-event.deltaY * pixels * 0.002), timeline.timeAt(Math.max(timeline.left, place(event).x)));
    onPoint(null, event);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const { x, y } = place(event);
    canvas.setPointerCapture(event.pointerId);
    if (!pointers.size) [moved, onTrack] = [0, y > timeline.height - TRACK_PX - 4];
    pointers.set(event.pointerId, x);
    if (onTrack) seek(x);
    canvas.classList.add("dragging");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return point(event);
    const { x } = place(event), before = [...pointers.values()];
    moved += Math.abs(x - pointers.get(event.pointerId));
    pointers.set(event.pointerId, x);
    if (onTrack) return seek(x);
    const after = [...pointers.values()], middle = (xs) => xs.reduce((sum, value) => sum + value) / xs.length;
    timeline.pan((middle(before) - middle(after)) * timeline.secondsPerPixel);
    const spread = (xs) => Math.max(20, Math.abs(xs[0] - xs[1]));
    if (after.length === 2) timeline.zoom(spread(after) / spread(before), timeline.timeAt(middle(after)));
    if (moved > 4) onPoint(null, event);
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (!pointers.size) canvas.classList.remove("dragging");
    if (event.type !== "pointerup" || moved > 4 || onTrack) return;
    point(event);
    const { x, y } = place(event), spot = timeline.locate(x, y);
    onChoose(spot ? timeline.choose(spot.trace, spot.worker, spot.time, 3 * timeline.secondsPerPixel) : timeline.choose(-1));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && onPoint(null, event));
  canvas.addEventListener("dblclick", () => timeline.reset());
  const keys = {
    "+": () => timeline.zoom(1.5), "=": () => timeline.zoom(1.5), "-": () => timeline.zoom(1 / 1.5),
    ArrowLeft: () => timeline.pan((timeline.from - timeline.to) / 8),
    ArrowRight: () => timeline.pan((timeline.to - timeline.from) / 8),
    ArrowUp: () => onChoose(timeline.step(0, -1)), ArrowDown: () => onChoose(timeline.step(0, 1)),
    "shift ArrowLeft": () => onChoose(timeline.step(-1, 0)), "shift ArrowRight": () => onChoose(timeline.step(1, 0)),
    Escape: () => onChoose(timeline.choose(-1)),
    Home: () => timeline.reset(), End: () => timeline.showAll(),
  };
  canvas.addEventListener("keydown", (event) => {
    const press = keys[event.shiftKey && event.key.startsWith("Arrow") ? `shift ${event.key}` : event.key];
    if (!press || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    press();
  });
}
