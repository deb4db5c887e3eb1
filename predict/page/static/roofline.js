// Every kernel below the roofs of its device, on logarithmic axes. Kernels without arithmetic stand in a
// strip at the left, as far below the memory roof as their bandwidth is.

function rooflinePlot({ k, names, device, peaks, choose, selected }) {
  const flops = k.flops.map((f, i) => (k.one[i] > 0 ? (f / k.one[i]) * 1e6 : 0));
  const intensity = k.flops.map((f, i) => (k.bytes[i] > 0 && f > 0 ? f / k.bytes[i] : 0));
  const total = sum(k.busy) || 1;
  const radius = k.busy.map((t) => clamp(2.2 + 26 * Math.sqrt(t / total), 2.2, 13));
  // The axis spans the kernels that take time, and the memory roof's corner; others stand at its edge.
  const ridge = Math.max(...peaks.map((p) => p.flops)) / device.bandwidth;
  const some = [...intensity.filter((v, i) => v > 0 && k.busy[i] > 2e-4 * total), ridge];
  const least = 10 ** Math.floor(Math.log10(Math.min(...some)));
  const most = Math.max(...some) * 3;
  const strip = least / 4;
  const peak = Math.max(...peaks.map((p) => p.flops));
  const achieved = flops.map((f, i) => (f > 0 ? f : (k.bytes[i] / k.one[i]) * 1e6 * strip));
  // Kernels that take next to nothing do not stretch the axis; they stand at its lower edge.
  const telling = achieved.filter((v, i) => v > 0 && k.busy[i] > 2e-4 * total);
  const low = Math.max(Math.min(...telling, peak * 1e-4) / 3, peak * 1e-8);
  const dots = { places: [] };
  const order = k.busy.map((_, i) => i).sort((a, b) => k.busy[b] - k.busy[a]);

  function draw(context, width, height) {
    const box = { left: 66, right: width - 14, top: 24, bottom: height - 44 };
    const [x, y] = logAxes(
      context,
      box,
      {
        from: least / 8,
        to: most,
        title: "FLOP per byte of memory traffic",
        format: (v) => (v < least ? "" : plain(v)),
      },
      { from: low, to: peak * 2.2, title: "FLOP/s", format: (v) => count(v).replace(/\.0+/, "") },
    );
    drawRoofs(context, box, x, y);
    if (intensity.some((v) => v === 0)) {
      context.fillStyle = colour("soft");
      context.textAlign = "center";
      context.textBaseline = "top";
      context.fillText("no FLOP", x(strip), box.bottom + 6);
    }
    dots.places = order.length ? k.busy.map((_, i) => place(i, x, y, box)) : [];
    for (const i of order) {
      context.globalAlpha = 0.6;
      disc(context, dots.places[i], radius[i], colour(shadeOf(i)));
    }
    context.globalAlpha = 1;
    const chosen = selected();
    if (chosen >= 0 && dots.places[chosen]) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.beginPath();
      context.arc(...dots.places[chosen], radius[chosen] + 3, 0, 7);
      context.stroke();
      context.lineWidth = 1;
    }
  }
  const shadeOf = (i) => {
    const kind = names.kind[k.kind[i]];
    return KNOWN_COLOURS.has(kind) ? kind : "rest";
  };
  const plain = (v) => (v >= 1 ? whole(v) : String(Number(v.toPrecision(1))));

  function place(i, x, y, box) {
    const at = intensity[i] > 0 ? intensity[i] : strip;
    return achieved[i] > 0
      ? [clamp(x(at), box.left, box.right), clamp(y(achieved[i]), box.top, box.bottom)]
      : null;
  }

  function drawRoofs(context, box, x, y) {
    context.save();
    context.beginPath();
    context.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
    context.clip();
    context.lineWidth = 1.6;
    context.strokeStyle = colour("soft");
    device.levels.forEach(([, bandwidth], level) => {
      const main = level === device.levels.length - 1;
      context.setLineDash(main ? [] : [4, 4]);
      const from = least / 8,
        to = peak / bandwidth;
      context.beginPath();
      context.moveTo(x(from), y(from * bandwidth));
      context.lineTo(x(to), y(peak));
      context.stroke();
      context.setLineDash([]);
      label(
        context,
        main ? `memory ${rate(bandwidth, "B/s")}` : `cache ${rate(bandwidth, "B/s")}`,
        x,
        y,
        bandwidth,
        !main,
      );
    });
    for (const { name, flops: own } of distinctPeaks()) {
      context.strokeStyle = colour("soft");
      context.beginPath();
      context.moveTo(x(Math.min(own / device.bandwidth, own / device.levels[0][1])), y(own));
      context.lineTo(box.right, y(own));
      context.stroke();
      context.fillStyle = colour("soft");
      context.textAlign = "right";
      context.textBaseline = "bottom";
      context.fillText(`${name} ${rate(own, "FLOP/s")}`, box.right - 4, y(own) - 3);
    }
    context.restore();
    context.lineWidth = 1;
  }

  // Along the roof, where it enters the plot.
  function label(context, text, x, y, bandwidth, above) {
    const at = Math.max(least / 8, low / bandwidth) * 1.6;
    const angle = Math.atan2(y(at * 10 * bandwidth) - y(at * bandwidth), x(at * 10) - x(at));
    context.save();
    context.translate(x(at), y(at * bandwidth));
    context.rotate(angle);
    context.fillStyle = colour("soft");
    context.textAlign = "left";
    context.textBaseline = above ? "bottom" : "top";
    context.fillText(text, 4, above ? -3 : 4);
    context.restore();
  }

  // Peaks that are not drawn onto one another.
  function distinctPeaks() {
    const found = [];
    for (const own of [...peaks].sort((a, b) => b.flops - a.flops)) {
      if (!found.some((p) => p.flops / own.flops < 1.25)) found.push(own);
    }
    return found;
  }

  const drawing = canvas(
    `Roofline of ${k.busy.length} kernels on ${device.name}; the table of kernels has the same figures`,
    (width) => clamp(width * 0.5, 300, 520),
    draw,
    { tabindex: "0" },
  );
  const node = drawing.node;
  node.addEventListener("pointermove", (event) => {
    const i = nearest(dots.places, ...placeOf(event, node), 16);
    node.style.cursor = i >= 0 ? "pointer" : "default";
    if (i < 0) {
      hideTip();
      return;
    }
    showTip(event.clientX, event.clientY, kernelTip(i));
  });
  node.addEventListener("pointerleave", hideTip);
  node.addEventListener("click", (event) => {
    const i = nearest(dots.places, ...placeOf(event, node), 16);
    if (i >= 0) choose(i);
  });
  node.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = order.indexOf(selected());
    choose(order[clamp(at + step, 0, order.length - 1)]);
  });
  return { body: drawing.host, redraw: drawing.later };
}
