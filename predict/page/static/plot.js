// Canvases that are sharp, follow their width and the colours, and the axes on them.

const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

// A canvas as wide as its place; draw(context, width, height) is called whenever it must change.
function canvas(label, height, draw, attributes = {}) {
  const node = el("canvas", { role: "img", "aria-label": label, ...attributes });
  const host = el("div", { class: "drawing" }, node);
  const paint = () => {
    const width = host.clientWidth;
    if (!width) return;
    const own = typeof height === "function" ? height(width) : height;
    const ratio = window.devicePixelRatio || 1;
    node.width = Math.round(width * ratio);
    node.height = Math.round(own * ratio);
    node.style.height = `${own}px`;
    const context = node.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, own);
    context.font = FONT;
    draw(context, width, own);
  };
  let waiting = false;
  const later = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      paint();
    });
  };
  redraws.add(paint);
  new ResizeObserver(later).observe(host);
  return { node, host, paint, later };
}

// Dark or light text, whichever is easier to read on a colour such as #3b6fe0.
const inks = new Map();
function inkOn(shade) {
  if (!inks.has(shade)) {
    const parts = [1, 3, 5]
      .map((at) => parseInt(shade.slice(at, at + 2), 16) / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    const light = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    inks.set(shade, light > 0.24 ? "#0b0f14" : "#ffffff");
  }
  return inks.get(shade);
}

// Place of a pointer on a node.
function placeOf(event, node) {
  const box = node.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function niceStep(range, wanted) {
  const raw = range / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * ([1, 2, 5, 10].find((m) => m * power >= raw) || 10);
}

function linearTicks(from, to, wanted) {
  const step = niceStep(to - from || 1, wanted);
  const ticks = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to * (1 + 1e-9); i++) ticks.push(i * step);
  return ticks;
}

// Powers of ten between two values; every so many, so that labels do not touch.
function logTicks(from, to, most) {
  const low = Math.ceil(Math.log10(from) - 1e-9),
    high = Math.floor(Math.log10(to) + 1e-9);
  const every = Math.max(1, Math.ceil((high - low + 1) / most));
  const ticks = [];
  for (let power = low; power <= high; power += every) ticks.push(10 ** power);
  return ticks;
}

// A scale from values to pixels on a logarithmic axis.
function logScale(from, to, start, end) {
  const low = Math.log10(from),
    width = Math.log10(to) - low || 1;
  return (value) => start + ((Math.log10(value) - low) / width) * (end - start);
}

// Text that is cut so that it fits.
function fitText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let low = 0,
    high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(text.slice(0, middle) + "…").width <= width) low = middle;
    else high = middle - 1;
  }
  return low ? text.slice(0, low) + "…" : "";
}

// Log-log axes: grid, tick labels and titles. Returns the scales.
function logAxes(context, box, x, y) {
  const sx = logScale(x.from, x.to, box.left, box.right);
  const sy = logScale(y.from, y.to, box.bottom, box.top);
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  context.lineWidth = 1;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const tick of logTicks(x.from, x.to, Math.floor((box.right - box.left) / 62))) {
    line(context, sx(tick), box.top, sx(tick), box.bottom);
    context.fillText(x.format(tick), sx(tick), box.bottom + 6);
  }
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of logTicks(y.from, y.to, Math.floor((box.bottom - box.top) / 32))) {
    line(context, box.left, sy(tick), box.right, sy(tick));
    context.fillText(y.format(tick), box.left - 7, sy(tick));
  }
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  context.fillText(x.title, (box.left + box.right) / 2, box.bottom + 34);
  context.textAlign = "left";
  context.fillText(y.title, 2, box.top - 9);
  return [sx, sy];
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(Math.round(x0) + 0.5, Math.round(y0) + 0.5);
  context.lineTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
  context.stroke();
}

// Index of the nearest of some points to a place, within a reach in pixels; -1 if none is.
function nearest(points, x, y, reach) {
  let best = -1,
    least = reach * reach;
  for (let i = 0; i < points.length; i++) {
    const p = points[i];
    if (!p) continue;
    const distance = (p[0] - x) ** 2 + (p[1] - y) ** 2;
    if (distance < least) {
      least = distance;
      best = i;
    }
  }
  return best;
}

function disc(context, at, radius, shade) {
  if (!at) return;
  context.fillStyle = shade;
  context.beginPath();
  context.arc(at[0], at[1], radius, 0, 7);
  context.fill();
}
