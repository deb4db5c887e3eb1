// Charts of answers, each with a button that saves its picture.

// A chart and the button; draw as of a canvas.
function chart(label, name, height, draw) {
  const { node, host } = canvas(label, height, draw);
  const picture = () => {
    const copy = el("canvas", { width: node.width, height: node.height });
    const context = copy.getContext("2d");
    context.fillStyle = colour("panel");
    context.fillRect(0, 0, copy.width, copy.height);
    context.drawImage(node, 0, 0);
    copy.toBlob((blob) => save(`${name}.png`, "image/png", blob));
  };
  return { host, tool: button("PNG", picture) };
}

// Rows of [label, low, high, value] from zero on; of bars the value is left out.
function rangeChart(label, name, rows, show) {
  const most = Math.max(...rows.map(([, , high]) => high), 1e-9);
  return chart(label, name, rows.length * 26 + 34, (context, width, height) => {
    const widest = Math.max(...rows.map(([text]) => context.measureText(text).width));
    const left = Math.min(widest, width / 3) + 12;
    const at = (value) => left + (value / most) * (width - left - 14);
    context.strokeStyle = colour("line");
    context.textBaseline = "middle";
    for (const tick of linearTicks(0, most, Math.max(2, width / 160))) {
      line(context, at(tick), 6, at(tick), height - 22);
      context.fillStyle = colour("soft");
      context.textAlign = tick ? "center" : "left";
      context.fillText(show(tick), at(tick), height - 10);
    }
    context.textAlign = "left";
    rows.forEach(([text, low, high, value, shade = "accent"], i) => {
      const middle = i * 26 + 19;
      context.fillStyle = colour("ink");
      context.fillText(fitText(context, text, left - 10), 0, middle);
      context.fillStyle = colour(shade);
      context.globalAlpha = value === undefined ? 1 : 0.35;
      context.fillRect(at(low), middle - 6, Math.max(1, at(high) - at(low)), 12);
      context.globalAlpha = 1;
      if (value !== undefined) context.fillRect(at(value) - 2, middle - 9, 4, 18);
    });
  });
}

// Points of { x, y, text } on axes from zero; the one that is meant has a ring.
function pointChart(label, name, points, x, y) {
  const most = (key) => 1.06 * Math.max(...points.map((point) => point[key]), 1e-9);
  const [right, top] = [most("x"), most("y")];
  let places = [];
  const made = chart(label, name, 300, (context, width, height) => {
    const box = { left: 64, right: width - 12, top: 22, bottom: height - 42 };
    const sx = (value) => box.left + (value / right) * (box.right - box.left);
    const sy = (value) => box.bottom - (value / top) * (box.bottom - box.top);
    context.strokeStyle = colour("line");
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    for (const tick of linearTicks(0, right, width / 120)) {
      line(context, sx(tick), box.top, sx(tick), box.bottom);
      context.fillText(x.show(tick), sx(tick), box.bottom + 14);
    }
    context.textAlign = "right";
    for (const tick of linearTicks(0, top, 5)) {
      line(context, box.left, sy(tick), box.right, sy(tick));
      context.fillText(y.show(tick), box.left - 6, sy(tick) + 4);
    }
    context.textAlign = "center";
    context.fillText(x.title, (box.left + box.right) / 2, height - 8);
    context.textAlign = "left";
    context.fillText(y.title, 0, 11);
    places = points.map((point) => [sx(point.x), sy(point.y)]);
    places.forEach((place, i) => disc(context, place, points[i].meant ? 6 : 4, colour(points[i].meant ? "good" : "accent")));
  });
  made.host.addEventListener("pointermove", (event) => {
    const found = nearest(places, ...placeOf(event, made.host), 24);
    if (found < 0) hideTip();
    else showTip(event.clientX, event.clientY, [points[found].text, x.show(points[found].x), y.show(points[found].y)]);
  });
  made.host.addEventListener("pointerleave", hideTip);
  return made;
}
