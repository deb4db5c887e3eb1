// A chip that is not there: each kernel's time follows its roofline, its share of the roofline kept.

// Bytes per second that a working set of so many bytes gets: as in opcast's roofline, a level serves up to
// half of its capacity, the next one from twice the capacity on.
function memorySeconds(bytes, levels) {
  const perByte = [];
  for (const [, bandwidth] of levels) perByte.push(Math.max(1 / bandwidth, ...perByte));
  let cost = perByte[0];
  for (let i = 0; i + 1 < levels.length; i++) {
    const spilled = (Math.log2(Math.max(bytes, 1)) - Math.log2(levels[i][0])) / 2 + 0.5;
    cost += clamp(spilled, 0, 1) * (perByte[i + 1] - perByte[i]);
  }
  return bytes * cost;
}

// Factors of a chip: cores, clock, bandwidth (of main memory), cache (capacity), floor (launch).
function changedLevels(levels, factors) {
  return levels.map(([capacity, bandwidth], i) => {
    const main = i === levels.length - 1;
    return [
      main || i < levels.length - 2 ? capacity : capacity * factors.cache,
      main ? bandwidth * factors.bandwidth : bandwidth * factors.clock,
    ];
  });
}

// Times of all kernels on the changed chip, and what bounds each.
function whatIf(k, device, factors) {
  const levels = changedLevels(device.levels, factors);
  const busy = [],
    bound = [];
  for (let i = 0; i < k.busy.length; i++) {
    const compute = k.compute[i] / (factors.cores * factors.clock);
    const old = memorySeconds(k.bytes[i], device.levels);
    const memory = old > 0 ? k.memory[i] * (memorySeconds(k.bytes[i], levels) / old) : k.memory[i];
    const before = Math.max(k.compute[i], k.memory[i]) + device.floor;
    const roof = Math.max(compute, memory),
      after = roof + device.floor * factors.floor;
    busy.push(k.collective[i] ? k.busy[i] : k.busy[i] * (after / before));
    bound.push(
      k.collective[i]
        ? "communication"
        : roof < device.floor * factors.floor
          ? "latency"
          : compute >= memory
            ? "compute"
            : "memory",
    );
  }
  return { busy, bound };
}

function whatIfPanel({ k, device, total }) {
  const factors = { cores: 1, clock: 1, bandwidth: 1, cache: 1, floor: 1 };
  const beyond = Math.max(0, total - sum(k.busy));
  const cache = device.levels.length > 1 ? device.levels[device.levels.length - 2][0] : 0;
  const unit = { gpu: "SMs", tpu: "cores" }[device.platform] || "cores";
  const listed = [
    ["cores", `Compute units (${unit})`, (f) => whole(device.cores * f)],
    ["clock", "Clock", (f) => (device.clock ? rate(device.clock * f, "Hz") : `× ${significant(f)}`)],
    ["bandwidth", "Memory bandwidth", (f) => rate(device.bandwidth * f, "B/s")],
    ["cache", "Last cache", (f) => size(cache * f)],
    ["floor", "Launch floor", (f) => duration(device.floor * f)],
  ].filter(([name]) => (name !== "cache" || cache) && (name !== "floor" || device.floor));
  const figure = el("span", { class: "figure" });
  const compared = el("span", { class: "soft" });
  const result = el("div", {});
  const inputs = [];

  function update() {
    const found = whatIf(k, device, factors);
    const summed = sum(found.busy) + beyond;
    const now = total * (summed / (sum(k.busy) + beyond));
    figure.textContent = duration(now);
    const ratio = total / now;
    compared.textContent =
      Math.abs(ratio - 1) < 5e-4
        ? "as predicted"
        : ratio > 1
          ? `${significant(ratio)} times as fast`
          : `${significant(1 / ratio)} times as slow`;
    const parts = grouped(found.bound, found.busy).map(([name, value]) => [`${name}-bound`, value, name]);
    if (beyond > 0) parts.push(["between kernels", beyond, "gap"]);
    result.replaceChildren(
      stackedBar(parts),
      el("div", { class: "sub" }, barTable("Time by bound on the changed chip", parts, summed)),
    );
  }
  const sliders = listed.map(([name, text, format]) => {
    const shown = el("b", {}, format(1));
    const id = `slider-${name}`;
    const input = el("input", {
      type: "range",
      id,
      min: "-2",
      max: "2",
      step: "0.02",
      value: "0",
      "aria-valuetext": format(1),
      oninput: () => {
        factors[name] = 2 ** Number(input.value);
        const by = Math.abs(factors[name] - 1) < 1e-6 ? "" : `  (× ${significant(factors[name])})`;
        shown.textContent = format(factors[name]) + by;
        input.setAttribute("aria-valuetext", shown.textContent);
        update();
      },
    });
    inputs.push(input);
    return el(
      "div",
      { class: "slider" },
      el("div", { class: "row" }, el("label", { for: id }, text), shown),
      input,
    );
  });
  const reset = el(
    "button",
    {
      type: "button",
      onclick: () =>
        inputs.forEach((input) => {
          input.value = "0";
          input.dispatchEvent(new Event("input"));
        }),
    },
    "Reset",
  );
  update();
  return el(
    "div",
    { class: "two" },
    el("div", {}, el("div", { class: "sliders" }, sliders), el("p", {}, reset)),
    el("div", {}, el("div", { class: "verdict", "aria-live": "polite" }, figure, compared), result),
  );
}
