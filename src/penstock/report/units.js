// Numbers in words, as penstock.units writes them, and searches in rising arrays.

function significant(value, digits = 3) {
  if (!value) return "0";
  const decimals = Math.min(12, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function showSeconds(seconds, digits = 3) {
  if (seconds === 0) return "0 s";
  if (seconds < 0) return `−${showSeconds(-seconds, digits)}`;
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
    if (seconds >= size) return `${significant(seconds / size, digits)} ${unit}`;
  return `${significant(seconds / 1e-9, digits)} ns`;
}

// On an axis: no more digits than the number needs.
const showTick = (seconds) => showSeconds(seconds, 4).replace(/\.?0+ /, (zeros) => (zeros.includes(".") ? " " : zeros));

function showBytes(bytes) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]])
    if (bytes >= size) return `${significant(bytes / size)} ${unit}`;
  return `${Math.round(bytes)} B`;
}

// A step of 1, 2 or 5 times a power of ten, of which about `count` fit in the span.
function tickStep(span, count) {
  const rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((times) => times * power >= rough) ?? 10);
}

// The first place in a non-decreasing array whose value is above the given one.
function firstAbove(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}
