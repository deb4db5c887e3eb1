// What would change a program's time: sliders over a few answers of the server, between which the page
// interpolates at once; the server's own answer to what the sliders say follows when they rest.

// Values that are asked for, as ratios to the one in use: of a batch and of rates; of a power limit.
const SHARES = { batch: [1 / 4, 1 / 2, 2, 4], rate: [1 / 2, 2], power: [0.4, 0.55, 0.7, 0.85] };
const REST_MS = 250;

// What can be changed: where a value goes in a request, what it is called, values that are asked for, the one in
// use, and how one is shown.
function changeable(query, device) {
  const chip = DATA.devices.find((own) => own.name === device) || {};
  const settings = { ...DATA.zoo[query.workload], ...pairsOf(query.settings) };
  const found = [];
  const add = (place, key, text, now, ratios, show, whole) => {
    if (!now) return;
    const round = (value) => (whole ? Math.max(1, Math.round(value)) : Number(value.toPrecision(4)));
    const stops = [...new Set([now, ...ratios.map((ratio) => round(now * ratio))])].sort((a, b) => a - b);
    found.push({ place, key, text, now, stops, show, round });
  };
  add("settings", "batch", "Batch", Number(settings.batch), SHARES.batch, whole, true);
  if (settings.dtype)
    found.push({ place: "settings", key: "dtype", text: "Format", now: settings.dtype, stops: DATA.dtypes, show: String });
  const giga = (value) => rate(value * 1e9, "B/s");
  const mega = (value) => rate(value * 1e6, "Hz");
  add("design", "hbm_bandwidth_gbps", "Memory bandwidth", chip.hbm_bandwidth_gbps, SHARES.rate, giga);
  add("design", "boost_mhz", "Clock", chip.boost_mhz, SHARES.rate, mega);
  add("power", "power_cap_w", "Power cap", chip.power_w, SHARES.power, (value) => `${significant(value)} W`);
  return found;
}

// Changed values by key, as the point of a request.
function pointOf(parts, values) {
  const point = {};
  for (const { place, key, now } of parts) {
    if (values[key] === now) continue;
    if (place === "power") point[key] = values[key];
    else (point[place] ||= {})[key] = values[key];
  }
  // The limit of a device file that names none follows its clock; what is capped is the board as it is.
  if (point.design && point.power_cap_w) point.design.power_w = parts.find((part) => part.place === "power").now;
  return point;
}

// The logarithm of a time between those at two stops of a slider; straight lines over logarithms of the values.
function ratioOf(part, value, times) {
  const { stops, now } = part;
  if (value === now) return 0;
  if (typeof now === "string") return Math.log(times.get(value) / times.get(now));
  const known = stops.filter((stop) => times.has(stop));
  const above = Math.max(1, known.findIndex((stop) => stop >= value));
  const [low, high] = [known[above - 1], known[above]];
  const share = Math.log(value / low) / Math.log(high / low);
  return Math.log(times.get(low) / times.get(now)) + share * Math.log(times.get(high) / times.get(low));
}

// The files and commands that give the answer to what was changed.
function changedCommand(query, device, point) {
  const settings = textOf({ ...pairsOf(query.settings), ...point.settings });
  const cap = point.power_cap_w ? ["--power-cap", `${point.power_cap_w}W`] : [];
  const design = point.design || {};
  const file = ["name: what-if", `base: ${device}`, ...Object.entries(design).map(([key, v]) => `${key}: ${v}`)];
  return {
    command: programCommand({ ...query, settings }, point.design ? "what-if.yaml" : device, ...cap),
    file: point.design ? file.join("\n") : "",
  };
}

function changeCard(query, answers) {
  const place = el("div", {});
  const devices = answers.map(({ device }) => device);
  const open = (device) => {
    if (chooser) chooser.value = device;
    place.replaceChildren(changePanel(query, answers.find((own) => own.device === device)));
  };
  const chooser = devices.length > 1 ? picker("Device to change", names(devices), open) : null;
  const start = button("Show sliders", () => {
    start.remove();
    open(devices[0]);
  });
  const { at } = pairsOf(query.changed);
  if (query.changed) {
    start.remove();
    open(devices.includes(at) ? at : devices[0]);
  }
  return card(
    {
      id: "change",
      title: "What would change it",
      says: "Asked at a few values; in between interpolated at once, then answered by the server.",
      tools: [chooser, query.changed ? null : start],
    },
    place,
  );
}

function changePanel(query, { device, answer: base }) {
  const parts = changeable(query, device);
  if (!parts.length) return el("p", { class: "soft" }, `Nothing of ${device} can be changed.`);
  const body = bodyOf("program", query, device);
  const known = new Map(parts.map((part) => [part, new Map([[part.now, base.latency_us]])]));
  // Answers by point, so that nothing is asked twice.
  const exact = new Map([["{}", base]]);
  const put = async (points) => {
    const answer = await (await asked("/v1/what-if", { ...body, points })).json();
    points.forEach((point, i) => exact.set(JSON.stringify(point), answer.points[i]));
    return answer.points;
  };
  const learn = async (own) => {
    const asks = own.flatMap((part) => part.stops.filter((stop) => stop !== part.now).map((stop) => ({ part, stop })));
    try {
      const found = await put(asks.map(({ part, stop }) => pointOf([part], { [part.key]: stop })));
      asks.forEach(({ part, stop }, i) => found[i].latency_us && known.get(part).set(stop, found[i].latency_us));
    } catch {
      // Then each value is asked by itself, which says why it cannot be answered.
    }
    own.forEach((part) => inputs[parts.indexOf(part)].enable());
  };
  const given = pairsOf(query.changed);
  const values = Object.fromEntries(
    parts.map(({ key, now }) => [key, given[key] === undefined ? now : typeof now === "string" ? given[key] : Number(given[key])]),
  );
  const figure = el("div", { "aria-live": "polite" });
  const commands = el("div", { class: "sub" });
  let waiting;

  function show() {
    clearTimeout(waiting);
    const point = pointOf(parts, values);
    const key = JSON.stringify(point);
    const changed = textOf({ at: device, ...Object.fromEntries(parts.filter((p) => values[p.key] !== p.now).map((p) => [p.key, values[p.key]])) });
    history.replaceState(null, "", linkOf("program", { ...query, changed: key === "{}" ? "" : changed }));
    const { command, file } = changedCommand(query, device, point);
    commands.replaceChildren(
      el("pre", { class: "command", id: "changed-command" }, command),
      file ? el("p", { class: "small soft" }, "with what-if.yaml:") : "",
      file ? el("pre", { class: "command", id: "changed-file" }, file) : "",
    );
    if (exact.has(key)) return shown(exact.get(key));
    const ratio = Math.exp(sum(parts.map((part) => ratioOf(part, values[part.key], known.get(part)))));
    const [latency_us, lo_us, hi_us] = [base.latency_us, base.lo_us, base.hi_us].map((us) => us * ratio);
    if (ratio > 0) shown({ latency_us, lo_us, hi_us }, true);
    else figure.replaceChildren(el("p", { class: "soft" }, "Asking …"));
    waiting = setTimeout(() => settle(key, point), REST_MS);
  }

  async function settle(key, point) {
    try {
      await put([point]);
    } catch (refusal) {
      exact.set(key, refusal);
    }
    if (JSON.stringify(pointOf(parts, values)) === key) shown(exact.get(key));
  }

  function shown(answer, interpolated) {
    if (!answer.latency_us) return figure.replaceChildren(refused(answer));
    const ratio = base.latency_us / answer.latency_us;
    const said =
      Math.abs(ratio - 1) < 5e-4
        ? "as predicted"
        : ratio > 1
          ? `${significant(ratio)} times as fast`
          : `${significant(1 / ratio)} times as slow`;
    const memory = answer.peak_memory_bytes
      ? `, ${size(answer.peak_memory_bytes)}${answer.fits === false ? ", does not fit" : ""}`
      : "";
    figure.replaceChildren(
      totalFigure(answer.latency_us, answer.lo_us, answer.hi_us, `On ${device}, changed`),
      el(
        "p",
        { class: "soft", id: "changed", "data-by": interpolated ? "interpolation" : "server" },
        said,
        memory,
        interpolated ? "; interpolated" : "",
      ),
    );
  }

  const inputs = parts.map((part) => slider(part, values, show));
  const reset = button("Reset", () => {
    parts.forEach(({ key, now }) => (values[key] = now));
    inputs.forEach((row) => row.read());
    show();
  });
  show();
  // One request after the other: a server has few workers. Sliders of the device share one, and so its program.
  const [settings, rates] = [true, false].map((own) => parts.filter(({ place }) => (place === "settings") === own));
  const groups = [...settings.map((part) => [part]), rates].filter((own) => own.length);
  groups.reduce((before, own) => before.then(() => learn(own)), Promise.resolve());
  return el(
    "div",
    { class: "two" },
    el("div", {}, el("div", { class: "sliders" }, inputs.map(({ node }) => node)), el("p", {}, reset)),
    el("div", {}, figure, commands),
  );
}

// A slider over the stops of a figure, equally far apart; of a format a list. It waits for its first answers.
function slider(part, values, show) {
  const { key, text, stops, round } = part;
  if (!round) {
    const node = picker(text, names(stops), (value) => {
      values[key] = value;
      show();
    });
    node.disabled = true;
    const read = () => (node.value = values[key]);
    read();
    const row = el("div", { class: "slider" }, el("div", { class: "row" }, text), node);
    return { node: row, read, enable: () => (node.disabled = false) };
  }
  const id = `change-${key}`;
  const label = el("b", {});
  const input = el("input", { type: "range", id, min: 0, max: stops.length - 1, step: 0.05, disabled: true });
  const valueAt = (at) => {
    const below = Math.min(Math.floor(at), stops.length - 2);
    return Number.isInteger(at) ? stops[at] : round(stops[below] * (stops[below + 1] / stops[below]) ** (at - below));
  };
  const tell = () => {
    label.textContent = part.show(values[key]);
    input.setAttribute("aria-valuetext", label.textContent);
  };
  const read = () => {
    const above = clamp(stops.findIndex((stop) => stop >= values[key]), 1, stops.length - 1);
    const [low, high] = [stops[above - 1], stops[above]];
    input.value = above - 1 + Math.log(values[key] / low) / Math.log(high / low);
    tell();
  };
  input.addEventListener("input", () => {
    values[key] = valueAt(Number(input.value));
    tell();
    show();
  });
  read();
  const head = el("div", { class: "row" }, el("label", { for: id }, text), label);
  return { node: el("div", { class: "slider" }, head, input), read, enable: () => (input.disabled = false) };
}
