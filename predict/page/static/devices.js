// One program on several devices: estimates and intervals on one logarithmic axis.

function devicesCard({ rows, lowering }, device, ownLowering) {
  const good = rows.filter((r) => !r.error).sort((a, b) => a.us - b.us),
    bad = rows.filter((r) => r.error);
  const base = good.find((r) => r.device === device);
  const [low, high] = [Math.min(...good.map((r) => r.lo)), Math.max(...good.map((r) => r.hi))];
  const scale = logScale(low / 1.15, high * 1.15, 0, 100),
    at = (v) => `${scale(v)}%`;
  const ticks = [1, 2, 5]
    .flatMap((m) => logTicks(low / 10 / m, high / m, 20).map((t) => t * m))
    .filter((t) => t > low && t < high);
  const sparse =
    ticks.length > 6
      ? ticks.filter((t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-6)
      : ticks;
  const tickRow = el(
    "div",
    { class: "range ticks", "aria-hidden": "true" },
    sparse.map((t) => el("span", { style: { left: at(t) } }, duration(t).replace(/\.0+/, ""))),
  );
  const list = good.map((r) =>
    el(
      "tr",
      { class: r.device === device ? "own" : null },
      el("th", { scope: "row" }, r.device),
      el("td", { class: "n" }, duration(r.us)),
      el(
        "td",
        { class: "plot" },
        el(
          "div",
          { class: "range", "aria-hidden": "true" },
          el("div", { class: "band", style: { left: at(r.lo), width: `${scale(r.hi) - scale(r.lo)}%` } }),
          el("div", { class: "dot", style: { left: at(r.us) } }),
        ),
      ),
      el("td", { class: "n soft" }, `${duration(r.lo)} – ${duration(r.hi)}`),
      base ? el("td", { class: "n" }, `${significant(r.us / base.us)}\u00a0×`) : null,
      el(
        "td",
        { class: `n ${r.fits === false ? "bad" : ""}` },
        r.device_bytes ? percent(r.peak_bytes / r.device_bytes) : "–",
      ),
      el("td", { class: "n" }, percent(r.inside)),
      el("td", { class: "soft" }, r.model),
    ),
  );
  const remarks = new Map();
  for (const r of good)
    for (const note of r.notes) remarks.set(note, [...(remarks.get(note) || []), r.device]);
  const head = (text, numbers = true) => el("th", { scope: "col", class: numbers ? "n" : null }, text);
  const free = lowering === "fused" ? ", which needs no compiler" : "";
  const same = lowering === ownLowering ? "" : ` The total above is from the lowering ${ownLowering}.`;
  const says =
    lowering === "as given"
      ? "The kernels of the given module, taken as they are: other devices' compilers would make others."
      : `The same program with the lowering ${lowering} for all${free}, so that only the devices differ.${same}`;
  return card(
    { id: "devices", title: "Other devices", link: "Devices", says },
    el(
      "div",
      { class: "scroll", style: { "max-height": "none" } },
      el(
        "table",
        { class: "devices" },
        el("caption", { class: "sr" }, "The program on other devices"),
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            head("device", false),
            head("time"),
            el("th", { class: "plot" }, tickRow),
            head("90 % interval"),
            base ? head(`to ${device}`) : null,
            head("of its memory"),
            head("in domain"),
            head("model", false),
          ),
        ),
        el(
          "tbody",
          {},
          list,
          bad.map((r) =>
            el(
              "tr",
              {},
              el("th", { scope: "row" }, r.device),
              el("td", { colspan: 7, class: "soft" }, r.error),
            ),
          ),
        ),
      ),
    ),
    remarks.size
      ? el(
          "details",
          { class: "sub small soft" },
          el("summary", {}, "What limits these figures"),
          el(
            "ul",
            {},
            [...remarks].map(([note, devices]) => el("li", {}, `${devices.join(", ")}: ${note}`)),
          ),
        )
      : null,
  );
}
