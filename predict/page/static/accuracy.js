// The page of tracked runs: predicted against measured, errors and coverage by group.

const NOMINAL = 0.9;
const RUNS = DATA.runs;
const levelNames = { kernel: "Kernels", program: "Whole programs", op: "Operators" };
const view = { run: 0, level: Object.keys(RUNS[0].levels)[0] || "kernel", by: "kind" };
const data = () => RUNS[view.run].levels[view.level];

const parity = canvas(
  "Predicted against measured latency; the tables below have the figures",
  (width) => clamp(width * 0.8, 300, 560),
  drawParity,
);
const spread = canvas(
  "Error by group; the table beside has the figures",
  () => 40 + 30 * Math.max(1, data() ? data()[view.by].length : 1),
  drawSpread,
);
let dots = [];

const shadeOf = (point, i) => {
  const name = point.names.kind[point.kind[i]];
  return KNOWN_COLOURS.has(name) ? name : WHEEL[point.kind[i] % WHEEL.length];
};

function drawParity(context, width, height) {
  const point = data().points,
    all = [...point.measured, ...point.predicted].filter((v) => v > 0);
  if (!all.length) return;
  const from = Math.min(...all) / 1.5,
    to = Math.max(...all) * 1.5;
  const box = { left: 66, right: width - 14, top: 24, bottom: height - 44 };
  const axis = (title) => ({ from, to, title, format: (v) => duration(v).replace(/\.0+/, "") });
  const [x, y] = logAxes(context, box, axis("measured"), axis("predicted"));
  context.save();
  context.beginPath();
  context.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  context.clip();
  context.strokeStyle = colour("soft");
  for (const factor of [1, 2, 0.5]) {
    context.setLineDash(factor === 1 ? [] : [4, 4]);
    context.beginPath();
    context.moveTo(x(from), y(from * factor));
    context.lineTo(x(to), y(to * factor));
    context.stroke();
  }
  context.setLineDash([]);
  context.globalAlpha = 0.55;
  dots = point.measured.map((m, i) => [x(m), y(point.predicted[i])]);
  dots.forEach((dot, i) => disc(context, dot, 2.6, colour(shadeOf(point, i))));
  context.restore();
  context.fillStyle = colour("soft");
  context.textAlign = "left";
  context.fillText("dashed: twice and half", box.left + 8, box.top + 14);
}

parity.node.addEventListener("pointermove", (event) => {
  const i = nearest(dots, ...placeOf(event, parity.node), 12),
    point = data().points;
  if (i < 0) {
    hideTip();
    return;
  }
  const error = point.predicted[i] / point.measured[i] - 1;
  showTip(event.clientX, event.clientY, [
    `${point.names.kind[point.kind[i]]} on ${point.names.device[point.device[i]]}`,
    `measured ${duration(point.measured[i])}, predicted ${duration(point.predicted[i])} (${error > 0 ? "+" : ""}${percent(error)})`,
    `interval ${duration(point.lo[i])} – ${duration(point.hi[i])}${point.inside[i] ? "" : ", outside of the training domain"}`,
  ]);
});
parity.node.addEventListener("pointerleave", hideTip);

// For each group: 10 to 90 %, the quartiles and the median of the error, and the label noise as a mark.
function drawSpread(context, width, height) {
  const groups = data()[view.by];
  const left = Math.min(190, width * 0.36),
    right = width - 12,
    top = 8;
  const most =
    Math.max(0.05, ...groups.map((g) => g.quantiles[4]), ...groups.map((g) => g.noise || 0)) * 1.08;
  const capped = Math.min(most, 3);
  const x = (v) => left + (Math.min(v, capped) / capped) * (right - left);
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  context.textBaseline = "top";
  context.textAlign = "center";
  for (const tick of linearTicks(0, capped, Math.max(2, Math.floor((right - left) / 80)))) {
    line(context, x(tick), top, x(tick), height - 26);
    context.fillText(percent(tick).replace(".0", ""), x(tick), height - 20);
  }
  groups.forEach((group, row) => {
    const y = top + row * 30,
      [low, q1, median, q3, high] = group.quantiles;
    const shade = colour(KNOWN_COLOURS.has(group.name) ? group.name : "accent");
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = colour("ink");
    context.fillText(fitText(context, group.name, left - 14), left - 10, y + 14);
    context.fillStyle = shade;
    context.globalAlpha = 0.28;
    context.fillRect(x(low), y + 9, x(high) - x(low), 10);
    context.globalAlpha = 0.7;
    context.fillRect(x(q1), y + 6, Math.max(1, x(q3) - x(q1)), 16);
    context.globalAlpha = 1;
    context.fillStyle = colour("ink");
    context.fillRect(x(median) - 1, y + 4, 2, 20);
    if (group.noise !== null) {
      context.strokeStyle = colour("bad");
      context.lineWidth = 2;
      line(context, x(group.noise), y + 2, x(group.noise), y + 26);
      context.lineWidth = 1;
      context.strokeStyle = colour("line");
    }
  });
}

function figuresTable(groups) {
  const row = (g, head) =>
    el(
      "tr",
      { class: head ? "own" : null },
      el("th", { scope: "row" }, g.name),
      el("td", { class: "n" }, whole(g.n)),
      el("td", { class: "n" }, percent(g.median_ape)),
      el("td", { class: "n soft" }, g.noise === null ? "–" : percent(g.noise)),
      el("td", { class: "n" }, percent(g.mape)),
      el("td", { class: "n" }, `${g.bias > 0 ? "+" : ""}${percent(g.bias)}`),
      el("td", { class: "n" }, g.spearman === null ? "–" : g.spearman.toFixed(3)),
      el("td", { class: `n ${g.coverage < NOMINAL - 0.05 ? "bad" : ""}` }, percent(g.coverage)),
      el("td", { class: "n" }, percent(g.width_median)),
      el("td", { class: "n" }, percent(g.inside)),
    );
  const heads = [
    view.by,
    "rows",
    "median APE",
    "label noise",
    "MAPE",
    "bias",
    "Spearman",
    "coverage",
    "width",
    "in domain",
  ];
  return el(
    "table",
    { class: "devices" },
    el("caption", { class: "sr" }, `Figures by ${view.by}`),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        heads.map((h, i) => el("th", { scope: "col", class: i ? "n" : null }, h)),
      ),
    ),
    el(
      "tbody",
      {},
      row(data().all, true),
      groups.map((g) => row(g, false)),
    ),
  );
}

function coverageTable(groups) {
  return el(
    "table",
    { class: "bars" },
    el("caption", { class: "sr" }, "Coverage of the 90 % intervals"),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, view.by),
        el("th", {}),
        el("th", { class: "n", scope: "col" }, "inside"),
        el("th", { class: "n", scope: "col" }, "aim"),
      ),
    ),
    el(
      "tbody",
      {},
      groups
        .slice(0, 14)
        .map((g) =>
          el(
            "tr",
            {},
            el("td", { class: "name" }, keyed(KNOWN_COLOURS.has(g.name) ? g.name : "accent", g.name)),
            barCell(g.coverage, g.coverage < NOMINAL - 0.05 ? "collective" : "fusion"),
            el("td", { class: "n" }, percent(g.coverage)),
            el("td", { class: "n soft" }, percent(NOMINAL)),
          ),
        ),
    ),
  );
}

const hosts = {
  tiles: el("div", { class: "tiles" }),
  figures: el("div", { class: "scroll", style: { "max-height": "none" } }),
  coverage: el("div", {}),
  legend: el("div", { class: "legend" }),
  notes: el("div", {}),
};

function show() {
  const run = RUNS[view.run],
    own = data(),
    all = own.all;
  hosts.tiles.replaceChildren(
    tile(
      "Median error",
      percent(all.median_ape),
      all.noise === null ? "label noise not known" : `label noise ${percent(all.noise)}`,
    ),
    tile("Mean error (MAPE)", percent(all.mape), `bias ${all.bias > 0 ? "+" : ""}${percent(all.bias)}`),
    tile(
      "Inside the interval",
      percent(all.coverage),
      `aim ${percent(NOMINAL)}, median width ${percent(all.width_median)}`,
      all.coverage,
    ),
    tile(
      "Order (Spearman)",
      all.spearman === null ? "–" : all.spearman.toFixed(3),
      `Kendall τ ${all.kendall === null ? "–" : all.kendall.toFixed(3)}`,
    ),
    tile("Rows", whole(all.n), run.kept < run.rows ? `a draw of ${whole(run.rows)}` : "all that were judged"),
    tile("In the training domain", percent(all.inside), "of the rows", all.inside),
  );
  const groups = own[view.by];
  hosts.figures.replaceChildren(figuresTable(groups));
  hosts.coverage.replaceChildren(coverageTable(groups));
  hosts.legend.replaceChildren(
    ...own.points.names.kind.slice(0, 14).map((name, i) =>
      el(
        "span",
        {},
        el("i", {
          class: "key",
          style: { background: variable(KNOWN_COLOURS.has(name) ? name : WHEEL[i % WHEEL.length]) },
        }),
        name,
      ),
    ),
  );
  hosts.notes.replaceChildren(
    el(
      "p",
      { class: "soft small" },
      `Run ${run.id.slice(0, 12)}, ${run.when} UTC; ` +
        Object.entries(run.params)
          .map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`)
          .join(", "),
    ),
  );
  parity.later();
  spread.later();
}

const runPicker =
  RUNS.length > 1
    ? picker(
        "Run",
        RUNS.map((r, i) => [String(i), `${r.name} · ${r.params.model || ""} · ${r.when}`]),
        (value) => {
          view.run = Number(value);
          if (!RUNS[view.run].levels[view.level]) view.level = Object.keys(RUNS[view.run].levels)[0];
          drawLevels();
          show();
        },
      )
    : null;
const levelHost = el("span", {});
function drawLevels() {
  const levels = Object.keys(RUNS[view.run].levels);
  levelHost.replaceChildren(
    ...(levels.length > 1
      ? [
          choice(
            "Level",
            levels.map((l) => [l, levelNames[l] || l]),
            view.level,
            (l) => {
              view.level = l;
              show();
            },
          ),
        ]
      : []),
  );
}
drawLevels();
const grouping = choice(
  "Group by",
  [
    ["kind", "Kind"],
    ["device", "Device"],
    ["split", "Split"],
  ],
  "kind",
  (by) => {
    view.by = by;
    show();
  },
);

function comparison() {
  const row = (run, i) => {
    const all = run.levels[view.level]?.all || Object.values(run.levels)[0].all;
    return el(
      "tr",
      {},
      el(
        "th",
        { scope: "row" },
        el(
          "button",
          {
            type: "button",
            onclick: () => {
              runPicker.value = String(i);
              runPicker.dispatchEvent(new Event("change"));
              scrollTo(0, 0);
            },
          },
          run.name,
        ),
      ),
      el("td", {}, run.params.model || ""),
      el("td", {}, run.params.split || ""),
      el("td", { class: "n" }, whole(all.n)),
      el("td", { class: "n" }, percent(all.median_ape)),
      el("td", { class: "n" }, percent(all.mape)),
      el("td", { class: "n" }, percent(all.coverage)),
      el("td", { class: "n soft" }, all.noise === null ? "–" : percent(all.noise)),
      el("td", { class: "n soft" }, run.when),
    );
  };
  return card(
    { id: "runs", title: "Runs side by side", link: "Runs" },
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "devices" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ["run", "model", "split", "rows", "median APE", "MAPE", "coverage", "label noise", "when"].map(
              (h, i) => el("th", { scope: "col", class: i > 2 ? "n" : null }, h),
            ),
          ),
        ),
        el("tbody", {}, RUNS.map(row)),
      ),
    ),
  );
}

const body = [
  card(
    {
      id: "overview",
      title: "At a glance",
      link: "Overview",
      says: "Errors are relative to the measured latency; label noise is the median difference of repeated measurements.",
      tools: [runPicker, levelHost].filter(Boolean),
    },
    hosts.tiles,
    el("div", { class: "sub" }, hosts.notes),
  ),
  el(
    "div",
    { class: "two" },
    el(
      "div",
      { class: "column" },
      card(
        {
          id: "parity",
          title: "Predicted against measured",
          link: "Parity",
          says: "Each point is a judged row; on the line a prediction is exact.",
        },
        parity.host,
        hosts.legend,
      ),
      card(
        {
          id: "coverage",
          title: "Coverage",
          link: "Coverage",
          says: "Share of measurements inside their 90 % interval.",
        },
        hosts.coverage,
      ),
    ),
    card(
      {
        id: "errors",
        title: "Error by group",
        link: "Errors",
        says: "Median, quartiles and 10 to 90 % of the absolute percentage error; red: label noise.",
        tools: [grouping],
      },
      spread.host,
    ),
  ),
  card({ id: "figures", title: "Figures", link: "Figures" }, hosts.figures),
  RUNS.length > 1 ? comparison() : null,
].filter(Boolean);
const params = RUNS[0].params;
showPage({
  brand: "accuracy of tracked runs",
  title: DATA.title,
  facts:
    RUNS.length === 1
      ? [
          ["model", params.model],
          ["split", params.split],
        ].filter(([, value]) => value)
      : [["runs", String(RUNS.length)]],
  body,
  foot: [
    "Figures are of the rows that the run keeps, on rows that the model did not learn from, as the named split says.",
  ],
});
show();
