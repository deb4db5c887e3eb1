// A timeline on a canvas: tracks of spans, an overview to choose a part, a curve below. Only what is in
// view is drawn, spans narrower than a pixel as one, so that many thousands stay fluid.

const LABELS = 96,
  TRACK = 26,
  MAIN = 38,
  OVERVIEW = 30,
  AXIS = 22,
  CURVE = 110;

// Tracks: { name, start, end, shade(i), text(i), tip(i), pick(i) }, sorted by start, without overlap in a track;
// main ones are taller, and the first of them is the overview.
// Curve: { name, us, value, format, limits: [[name, value]] } or null.
function timeline({ label, tracks, end, curve, selected }) {
  let from = 0,
    to = end || 1,
    drag = null,
    picked = null,
    wide = 1;
  let longestOf = { inner: -1, best: [] };
  const tall = (track) => (track.main ? MAIN : TRACK);
  const height = () => OVERVIEW + 8 + sum(tracks.map(tall)) + AXIS + (curve ? CURVE + 14 : 0);
  const drawing = canvas(label, height, draw, {
    tabindex: "0",
    "aria-describedby": "timeline-keys",
    role: "application",
  });
  const node = drawing.node;
  const x = (us) => LABELS + ((us - from) / (to - from)) * (wide - LABELS);
  const us = (place) => from + ((place - LABELS) / (wide - LABELS)) * (to - from);

  function view(low, high) {
    const least = Math.max(end * 1e-6, 1e-4);
    const width = clamp(high - low, least, end);
    from = clamp(low, 0, end - width);
    to = from + width;
    hideTip();
    drawing.later();
    changed();
  }
  function zoom(factor, about = (from + to) / 2) {
    view(about - (about - from) * factor, about + (to - about) * factor);
  }

  function draw(context, width) {
    wide = width;
    drawOverview(context, width);
    let top = OVERVIEW + 8;
    context.textBaseline = "middle";
    for (const track of tracks) {
      context.fillStyle = colour("soft");
      context.textAlign = "left";
      context.fillText(fitText(context, track.name, LABELS - 10), 0, top + tall(track) / 2);
      context.fillStyle = colour("sunk");
      context.fillRect(LABELS, top + 2, width - LABELS, tall(track) - 4);
      drawSpans(context, track, top + 2, tall(track) - 4, width);
      top += tall(track);
    }
    drawAxis(context, top, width);
    if (curve) drawCurve(context, top + AXIS + 10, width);
  }

  // Spans in view; of those narrower than a pixel the longest of each pixel.
  function drawSpans(context, track, top, high, width) {
    let pixel = -1,
      longest = 0,
      best = -1;
    const flush = () => {
      if (best >= 0) {
        context.fillStyle = colour(track.shade(best));
        context.fillRect(pixel, top, 1, high);
      }
      best = -1;
    };
    context.save();
    context.beginPath();
    context.rect(LABELS, 0, width - LABELS, 1e4);
    context.clip();
    for (let i = firstAfter(track.end, from); i < track.start.length && track.start[i] < to; i++) {
      const left = x(track.start[i]),
        right = x(track.end[i]);
      if (right - left >= 1) {
        flush();
        drawSpan(context, track, i, left, right, top, high);
        continue;
      }
      const place = Math.floor(left);
      if (place !== pixel) {
        flush();
        pixel = place;
        longest = 0;
      }
      if (track.end[i] - track.start[i] >= longest) {
        longest = track.end[i] - track.start[i];
        best = i;
      }
    }
    flush();
    context.restore();
  }

  function drawSpan(context, track, i, left, right, top, high) {
    context.fillStyle = colour(track.shade(i));
    const gap = right - left > 12 ? 0.7 : 0;
    context.fillRect(left, top, right - left - gap, high);
    const first = Math.max(left, LABELS),
      room = Math.min(right, wide) - first - 8;
    if (room > 26) {
      context.fillStyle = inkOn(colour(track.shade(i)));
      context.textAlign = "left";
      context.fillText(fitText(context, track.text(i), room), first + 4, top + high / 2 + 0.5);
    }
    if (selected && track.rows && track.rows(i) === selected()) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(left + 1, top + 1, Math.max(right - left - 2, 2), high - 2);
    }
  }

  // The whole time, the last track, and the part in view.
  function drawOverview(context, width) {
    const track = tracks.find((t) => t.main) || tracks[tracks.length - 1];
    const inner = width - LABELS;
    context.fillStyle = colour("sunk");
    context.fillRect(LABELS, 0, inner, OVERVIEW);
    if (track) {
      const best = longestByPixel(track, inner);
      context.globalAlpha = 0.75;
      for (let p = 0; p < inner; p++) {
        if (best[p] < 0) continue;
        context.fillStyle = colour(track.shade(best[p]));
        context.fillRect(LABELS + p, 7, 1, OVERVIEW - 14);
      }
      context.globalAlpha = 1;
    }
    const left = LABELS + (from / end) * inner,
      right = LABELS + (to / end) * inner;
    context.strokeStyle = colour("accent");
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, 0.75, Math.max(right - left - 1.5, 3), OVERVIEW - 1.5);
    context.lineWidth = 1;
    context.fillStyle = colour("soft");
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText("whole run", 0, OVERVIEW / 2);
  }

  // For each pixel of the overview the longest span in it; the same until the width changes.
  function longestByPixel(track, inner) {
    if (longestOf.inner === inner) return longestOf.best;
    const longest = new Float64Array(Math.ceil(inner) + 1),
      best = new Int32Array(Math.ceil(inner) + 1).fill(-1);
    for (let i = 0; i < track.start.length; i++) {
      const length = track.end[i] - track.start[i],
        left = Math.floor((track.start[i] / end) * inner),
        right = Math.min(Math.floor((track.end[i] / end) * inner), best.length - 1);
      for (let p = left; p <= right; p++) {
        if (length >= longest[p]) {
          longest[p] = length;
          best[p] = i;
        }
      }
    }
    longestOf = { inner, best };
    return best;
  }

  function drawAxis(context, top, width) {
    context.fillStyle = colour("soft");
    context.strokeStyle = colour("line");
    context.textBaseline = "top";
    const ticks = linearTicks(from, to, Math.max(2, Math.floor((width - LABELS) / 110)));
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : to - from;
    for (const tick of ticks) {
      line(context, x(tick), top, x(tick), top + 4);
      context.textAlign = x(tick) > width - 24 ? "right" : x(tick) < LABELS + 12 ? "left" : "center";
      context.fillText(timeAt(tick, step), x(tick), top + 7);
    }
  }

  function drawCurve(context, top, width) {
    const bottom = top + CURVE;
    const most = Math.max(...curve.value, 1);
    const shown = curve.limits.filter(([, value]) => value && value < most * 3);
    const ceiling = Math.max(most, ...shown.map(([, value]) => value)) * 1.08;
    const y = (value) => bottom - (value / ceiling) * CURVE;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = colour("soft");
    context.fillText(curve.name, 0, top + 8);
    context.strokeStyle = colour("line");
    context.textAlign = "right";
    for (const tick of curve.ticks(ceiling)) {
      line(context, LABELS, y(tick), width, y(tick));
      if (tick > 0) context.fillText(curve.format(tick), LABELS - 6, Math.max(y(tick), top + 24));
    }
    context.save();
    context.beginPath();
    context.rect(LABELS, top - 6, width - LABELS, CURVE + 7);
    context.clip();
    const steps = curvePath(y);
    context.beginPath();
    context.moveTo(x(from), bottom);
    for (const [px, py] of steps) context.lineTo(px, py);
    context.lineTo(x(to), bottom);
    context.closePath();
    context.globalAlpha = 0.22;
    context.fillStyle = colour("accent");
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colour("accent");
    context.lineWidth = 1.5;
    context.beginPath();
    steps.forEach(([px, py], i) => (i ? context.lineTo(px, py) : context.moveTo(px, py)));
    context.stroke();
    context.lineWidth = 1;
    context.setLineDash([5, 4]);
    context.textAlign = "right";
    for (const [name, value] of shown) {
      context.strokeStyle = colour("soft");
      line(context, LABELS, y(value), width, y(value));
      context.fillStyle = colour("soft");
      const text = `${name} ${curve.format(value)}`,
        place = y(value) + (y(value) < top + 14 ? 10 : -9);
      const room = context.measureText(text).width;
      context.fillStyle = colour("panel");
      context.globalAlpha = 0.8;
      context.fillRect(width - room - 8, place - 7, room + 8, 14);
      context.globalAlpha = 1;
      context.fillStyle = colour("soft");
      context.fillText(text, width - 4, place);
    }
    context.setLineDash([]);
    context.restore();
  }

  function curvePath(y) {
    const steps = [];
    const first = Math.max(0, firstAfter(curve.us, from) - 1);
    for (let i = first; i < curve.us.length && curve.us[i] <= to; i++) {
      const next = i + 1 < curve.us.length ? curve.us[i + 1] : end;
      steps.push(
        [x(Math.max(curve.us[i], from)), y(curve.value[i])],
        [x(Math.min(next, to)), y(curve.value[i])],
      );
    }
    return steps;
  }

  // What is below the pointer: a track and a span of it, or a moment of the curve.
  function below(px, py) {
    if (px < LABELS || py < OVERVIEW + 8) return null;
    const at = us(px);
    let bottom = OVERVIEW + 8;
    const track = tracks.find((own) => {
      bottom += tall(own);
      return py < bottom;
    });
    if (track) {
      const slack = (to - from) / wide;
      let i = firstAfter(track.end, at - slack);
      if (i < track.start.length && track.start[i] <= at + slack) {
        while (i + 1 < track.start.length && track.end[i] < at && track.start[i + 1] <= at) i++;
        return { track, i };
      }
      return null;
    }
    if (curve && py > height() - CURVE - 14) {
      const i = Math.max(0, firstAfter(curve.us, at + 1e-9) - 1);
      return { lines: [curve.format(curve.value[i]), `${curve.name.toLowerCase()} after ${duration(at)}`] };
    }
    return null;
  }

  node.addEventListener("pointermove", (event) => {
    const [px, py] = placeOf(event, node);
    if (drag) {
      moveDrag(px);
      return;
    }
    const found = below(px, py);
    node.style.cursor =
      py < OVERVIEW ? "col-resize" : found && found.track && found.track.pick ? "pointer" : "grab";
    if (!found) {
      hideTip();
      return;
    }
    showTip(event.clientX, event.clientY, found.lines || found.track.tip(found.i));
  });
  node.addEventListener("pointerleave", () => {
    if (!drag) hideTip();
  });
  node.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const [px, py] = placeOf(event, node);
    if (px < LABELS) return;
    node.setPointerCapture(event.pointerId);
    drag = { px, from, to, overview: py < OVERVIEW, moved: false };
    picked = below(px, py);
  });
  function moveDrag(px) {
    if (Math.abs(px - drag.px) > 3) drag.moved = true;
    if (!drag.moved) return;
    const inner = wide - LABELS;
    if (drag.overview) {
      const [a, b] = [drag.px, px].map((p) => clamp((p - LABELS) / inner, 0, 1) * end).sort((p, q) => p - q);
      view(a, b);
    } else {
      const shift = ((drag.px - px) / inner) * (drag.to - drag.from);
      view(drag.from + shift, drag.to + shift);
    }
  }
  node.addEventListener("pointerup", (event) => {
    const done = drag;
    drag = null;
    if (!done || done.moved) return;
    if (done.overview) {
      const about = ((placeOf(event, node)[0] - LABELS) / (wide - LABELS)) * end,
        half = (to - from) / 2;
      view(about - half, about + half);
    } else if (picked && picked.track && picked.track.pick) picked.track.pick(picked.i);
  });
  node.addEventListener("pointercancel", () => {
    drag = null;
  });
  node.addEventListener("dblclick", (event) => {
    const found = below(...placeOf(event, node));
    if (!found || !found.track) return;
    const low = found.track.start[found.i],
      high = found.track.end[found.i],
      more = (high - low) * 0.15;
    view(low - more, high + more);
  });
  node.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== node) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const shift = (event.deltaX / wide) * (to - from);
        view(from + shift, to + shift);
      } else zoom(Math.exp(clamp(event.deltaY, -240, 240) * 0.003), us(placeOf(event, node)[0]));
    },
    { passive: false },
  );
  node.addEventListener("keydown", (event) => {
    const step = (to - from) * 0.2;
    const act = {
      ArrowLeft: () => view(from - step, to - step),
      ArrowRight: () => view(from + step, to + step),
      "+": () => zoom(0.6),
      "=": () => zoom(0.6),
      "-": () => zoom(1 / 0.6),
      0: () => view(0, end),
      Home: () => view(0, end),
    }[event.key];
    if (act && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      act();
    }
  });

  const shown = el("span", { class: "soft small", "aria-live": "polite" });
  function changed() {
    shown.textContent = `${duration(to - from)} of ${duration(end)}`;
  }
  changed();
  const tools = [
    shown,
    el("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoom(0.5) }, "+"),
    el("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoom(2) }, "−"),
    el("button", { type: "button", onclick: () => view(0, end) }, "All"),
  ];
  const keys = el(
    "p",
    { class: "hint", id: "timeline-keys" },
    "Drag to move; drag in the upper strip to choose a part; Ctrl and wheel, + and − to zoom; double click for one span; " +
      "arrow keys and 0 once it has the focus.",
  );
  return { tools, body: [drawing.host, keys], redraw: drawing.later, view, bounds: () => [from, to] };
}

// First index whose value is above a bound; values do not fall.
function firstAfter(values, bound) {
  let low = 0,
    high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > bound) high = middle;
    else low = middle + 1;
  }
  return low;
}

// A time on the axis with as many digits as its step needs.
function timeAt(us, step) {
  const [scale, unit] =
    step >= 2e5 ? [1e6, "s"] : step >= 200 ? [1e3, "ms"] : step >= 0.2 ? [1, "µs"] : [1e-3, "ns"];
  const places = clamp(Math.ceil(-Math.log10(step / scale) - 1e-9), 0, 6);
  return `${(us / scale).toFixed(places)} ${unit}`;
}
