// The page of a program on a device.

const K = DATA.kernels.columns,
  N = DATA.kernels.names,
  DEVICE = DATA.device;
K.collective = K.bound.map((code) => N.bound[code] === "communication");
const TOTAL = DATA.total.us,
  BUSY = sum(K.busy),
  LEFT = DATA.kernels.left_out;
const BEYOND = Math.max(0, TOTAL - BUSY - LEFT.us);
// Kernels of several streams take more together than the run: shares are of what they take together.
const SUMMED = BUSY + LEFT.us + BEYOND;

const state = { row: -1 };
const followers = [];
const explained = new Map(DATA.explained.flatMap((own) => own.rows.map((row) => [row, own])));
const detailsHost = el("div", {});
const selected = () => state.row;

function choose(row, scroll = true) {
  state.row = row;
  for (const follow of followers) follow();
  detailsHost.replaceChildren();
  if (row < 0) return;
  const shown = kernelDetails({ k: K, names: N, total: SUMMED, explained, close: () => choose(-1) }, row);
  detailsHost.append(shown);
  if (scroll) {
    shown.scrollIntoView({ block: "nearest" });
    shown.focus({ preventScroll: true });
  }
}

function kernelTip(i) {
  return [
    K.name[i],
    `${N.kind[K.kind[i]]}, ${N.bound[K.bound[i]]}-bound, ${percent(roofShare(K, i))} of its roofline`,
    `${duration(K.busy[i])}, ${percent(K.busy[i] / SUMMED)}${K.runs[i] > 1 ? `, ${whole(K.runs[i])} runs` : ""}`,
    `${count(K.flops[i])} FLOP, ${size(K.bytes[i])}`,
    [N.module[K.module[i]], shortLine(N.line[K.line[i]])].filter(Boolean).join(" · ") || "origin not known",
    ...(K.inside[i] ? [] : ["outside of the training domain"]),
  ];
}

function overview() {
  const { memory } = DATA;
  const work = sum(K.flops.map((f, i) => f * K.runs[i])),
    moved = sum(K.bytes.map((b, i) => b * K.runs[i]));
  const peak = Math.max(...DATA.peaks.map((p) => p.flops));
  const speed = (work / TOTAL) * 1e6,
    traffic = (moved / TOTAL) * 1e6;
  const fit = memory.device_bytes
    ? `${memory.fits ? "fits" : "does not fit"} in ${size(memory.device_bytes)}`
    : memory.source;
  return card(
    { id: "overview", link: "Overview" },
    el(
      "div",
      { class: "hero" },
      totalFigure(TOTAL, DATA.total.lo, DATA.total.hi, `Predicted time of one run on ${DEVICE.name}`),
      el(
        "div",
        { class: "tiles" },
        tile(
          "Peak memory",
          size(memory.peak_bytes),
          `${fit} · ${memory.source}`,
          memory.device_bytes ? memory.peak_bytes / memory.device_bytes : null,
        ),
        tile("Achieved", rate(speed, "FLOP/s"), `${percent(speed / peak)} of the peak`, speed / peak),
        tile(
          "Memory traffic",
          rate(traffic, "B/s"),
          `${percent(traffic / DEVICE.bandwidth)} of the bandwidth`,
          traffic / DEVICE.bandwidth,
        ),
        tile("Kernels", whole(K.name.length + LEFT.count), `${whole(sum(K.runs))} executions`),
        tile("In the training domain", percent(DATA.inside), "of the kernels' time", DATA.inside),
        tile("Between kernels", duration(BEYOND), `${percent(BEYOND / TOTAL)} of the run`, BEYOND / TOTAL),
      ),
    ),
  );
}

function breakdownCards() {
  const named = (column, fallback) =>
    grouped(
      K[column].map((code) => N[column][code] || fallback),
      K.busy,
    );
  const gap = BEYOND > 0 ? [["between kernels", BEYOND, "gap"]] : [];
  const kinds = [...named("kind").map(([name, value]) => [name, value, name]), ...gap];
  const bounds = named("bound").map(([name, value]) => [`${name}-bound`, value, name]);
  const phases = named("phase", "no gradient").map(([name, value]) => [name, value, name]);
  const left = card(
    { id: "kinds", title: "Where the time goes", link: "Breakdown" },
    stackedBar(kinds),
    el("div", { class: "sub" }, barTable("Time by kind of kernel", kinds, SUMMED, "kind")),
    barWithLegend("By what limits the kernels", bounds),
    phases.length > 1 ? barWithLegend("By pass", phases) : null,
  );
  const lines = grouped(
    K.line.map((code) => N.line[code] || "not known"),
    K.busy,
  );
  const [layers, modules] = moduleTable(
    K.module.map((code) => N.module[code]),
    K.busy,
    SUMMED,
  );
  const lineTable = el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "bars" },
      el("caption", { class: "sr" }, "Time by source line"),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "line"),
          el("th", {}),
          el("th", { class: "n", scope: "col" }, "time"),
          el("th", { class: "n", scope: "col" }, "share"),
        ),
      ),
      el(
        "tbody",
        {},
        lines
          .slice(0, 40)
          .map(([name, value]) =>
            el(
              "tr",
              {},
              el("td", { class: "name mono", title: name }, shortLine(name)),
              barCell(value / lines[0][1], "accent"),
              el("td", { class: "n" }, duration(value)),
              el("td", { class: "n" }, percent(value / SUMMED)),
            ),
          ),
      ),
    ),
  );
  const host = el("div", {});
  const layersHost = el("span", {}, layers);
  const hasModules = N.module.some(Boolean);
  const view = (which) => {
    host.replaceChildren(which === "modules" ? modules : lineTable);
    layersHost.hidden = which !== "modules";
  };
  view(hasModules ? "modules" : "lines");
  const tabs = hasModules
    ? choice(
        "Break down by",
        [
          ["modules", "Modules"],
          ["lines", "Source lines"],
        ],
        "modules",
        view,
      )
    : null;
  const right = card({ id: "origin", title: "In your program", tools: [layersHost, tabs] }, host);
  return el("div", { class: "two wide-right" }, left, right);
}

function timelineCard() {
  const rows = K.start.map((_, i) => i);
  const track = (name, own, main = false) => ({
    name,
    main,
    start: own.map((i) => K.start[i]),
    end: own.map((i) => K.end[i]),
    shade: (s) => N.kind[K.kind[own[s]]],
    text: (s) => K.name[own[s]],
    tip: (s) => kernelTip(own[s]),
    pick: (s) => choose(own[s]),
    rows: (s) => own[s],
  });
  const single = DATA.streams.length === 2;
  const streams = DATA.streams
    .map((name, stream) =>
      track(
        name,
        rows.filter((i) => K.stream[i] === stream),
        single,
      ),
    )
    .filter((t) => t.start.length);
  const merged = (name, key, shade) => {
    const spans = [];
    for (const i of rows) {
      if (K.stream[i] !== 0) continue;
      const own = key(i),
        last = spans[spans.length - 1];
      if (last) last.end = Math.max(last.end, K.start[i]);
      if (last && last.key === own) {
        last.end = K.end[i];
        last.busy += K.busy[i];
        last.count++;
      } else spans.push({ key: own, start: K.start[i], end: K.end[i], busy: K.busy[i], count: 1 });
    }
    const shown = spans.filter((s) => s.key);
    return {
      name,
      start: shown.map((s) => s.start),
      end: shown.map((s) => s.end),
      shade: (s) => shade(shown[s].key),
      text: (s) => shown[s].key.split("/").pop(),
      tip: (s) => [
        shown[s].key.replaceAll("/", " › "),
        `${duration(shown[s].busy)} in ${whole(shown[s].count)} kernels one after another`,
      ],
    };
  };
  const tracks = [];
  if (single && N.phase.filter(Boolean).length)
    tracks.push(
      merged(
        "pass",
        (i) => N.phase[K.phase[i]],
        (key) => key,
      ),
    );
  if (single && N.module.some(Boolean)) {
    const level = (i) => N.module[K.module[i]].split("/").slice(0, 2).join("/");
    const number = new Map();
    tracks.push(
      merged("module", level, (key) => {
        if (!number.has(key)) number.set(key, number.size);
        return WHEEL[number.get(key) % WHEEL.length];
      }),
    );
  }
  tracks.push(...streams);
  const { memory } = DATA;
  const curve =
    memory.us && memory.us.length
      ? {
          name: "Memory",
          us: memory.us,
          value: memory.bytes,
          format: size,
          ticks: sizeTicks,
          limits: [
            ["capacity", memory.device_bytes],
            [
              memory.source === "compiler" ? "compiler's peak" : "",
              memory.source === "compiler" ? memory.peak_bytes : 0,
            ],
          ],
        }
      : null;
  const drawn = timeline({
    label: `Timeline of ${K.name.length} kernels; tracks: ${tracks.map((t) => t.name).join(", ")}`,
    tracks,
    end: Math.max(TOTAL, ...K.end),
    curve,
    selected,
  });
  followers.push(drawn.redraw);
  const says = [
    "Kernels in the order of the schedule, asynchronous ones beside them; what the run takes between kernels is spread over them.",
    curve
      ? "Below it the memory in use, from the lifetimes of buffers."
      : `No memory timeline: ${memory.why_not}.`,
  ];
  if (DATA.stretch < 0.995)
    says.push(`Kernels overlap more than the schedule shows: drawn ${percent(DATA.stretch)} as long.`);
  const kinds = grouped(
    K.kind.map((code) => N.kind[code]),
    K.busy,
  );
  return card(
    {
      id: "timeline",
      title: "Timeline and memory",
      link: "Timeline",
      says: says.join(" "),
      tools: drawn.tools,
    },
    drawn.body,
    el(
      "div",
      { class: "legend" },
      kinds.map(([name]) =>
        el("span", {}, el("i", { class: "key", style: { background: variable(name) } }), name),
      ),
    ),
  );
}

function sizeTicks(ceiling) {
  const unit = 2 ** (10 * Math.floor(Math.log2(ceiling) / 10));
  return linearTicks(0, ceiling / unit, 4).map((tick) => tick * unit);
}

function rooflineCard() {
  const drawn = rooflinePlot({ k: K, names: N, device: DEVICE, peaks: DATA.peaks, choose, selected });
  followers.push(drawn.redraw);
  const says =
    "Every kernel at what it is predicted to achieve; large ones take more of the time. Kernels without arithmetic stand at the left, as far " +
    "below the memory roof as their bandwidth is. Traffic is what a kernel touches: one that the cache serves may stand above the memory roof.";
  return card(
    { id: "roofline", title: "Roofline", link: "Roofline", says },
    drawn.body,
    el(
      "div",
      { class: "legend" },
      grouped(
        K.kind.map((code) => N.kind[code]),
        K.busy,
      ).map(([name]) =>
        el("span", {}, el("i", { class: "key", style: { background: variable(name) } }), name),
      ),
    ),
  );
}

function whatIfCard() {
  const says =
    "An approximation made in this page: each kernel keeps its share of the roofline while compute, bandwidth and cache change. " +
    "Waves, tiles, fusion and intervals are not predicted anew; opcast predict does that for a device file.";
  return card(
    { id: "whatif", title: "What if the chip were another", link: "What if", says },
    whatIfPanel({ k: K, device: DEVICE, total: TOTAL }),
  );
}

function kernelsCard() {
  const table = kernelTable({ k: K, names: N, total: SUMMED, choose, selected });
  followers.push(() => table.show(state.row));
  const left = LEFT.count
    ? ` ${whole(LEFT.count)} shorter kernels, ${duration(LEFT.us)} together, are not listed.`
    : "";
  return card(
    {
      id: "kernels",
      title: "Kernels",
      link: "Kernels",
      says: `Choose one for its reasons and the measured kernels that it resembles.${left}`,
    },
    el("div", { class: "tools full" }, table.tools),
    detailsHost,
    table.body,
  );
}

const facts = [
  ["device", DEVICE.name],
  ["model", DATA.model],
  ["lowering", DATA.lowering],
];
if (DATA.compiler) facts.push(["compiler", DATA.compiler]);
showPage({
  brand: "predicted run of a program",
  title: `${DATA.program} on ${DEVICE.name}`,
  facts,
  body: [
    overview(),
    notes(DATA.notes, DATA.standing),
    breakdownCards(),
    timelineCard(),
    rooflineCard(),
    DATA.compare ? devicesCard(DATA.compare, DEVICE.name, DATA.lowering) : null,
    whatIfCard(),
    kernelsCard(),
  ].filter(Boolean),
  foot: [
    "Predicted by opcast; nobody ran the program. Intervals hold nine times in ten in the training domain, and less surely outside of it.",
  ],
});
