// Answers of the server as figures and tables, and what can be done with them.

const DAY_S = 86400;

// A table whose first column heads the rows.
const table = (caption, heads, rows) =>
  scrollTable(caption, heads, rows, (cell) => el("th", { scope: "row" }, cell));
const button = (text, onclick) => el("button", { type: "button", onclick }, text);
const between = (lo, hi, show) => `${show(lo)} – ${show(hi)}`;
const ENERGIES = [
  [1e6, "MJ"],
  [1e3, "kJ"],
  [1, "J"],
  [1e-3, "mJ"],
  [1e-6, "µJ"],
];
const joules = (value) => withUnit(value, ENERGIES);
const dollars = (value) =>
  value === undefined || value === null ? "–" : `$${value < 1000 ? significant(value) : whole(value)}`;

// The headline of an answer: [value, low, high] in microseconds, and in words what it is.
const HEADLINES = {
  plans: ({ front: [a] }) => [a?.latency_us, a?.lo_us, a?.hi_us, a ? `a step under ${a.plan}` : "no plan fits"],
  deployments: ({ best: a }) => (a ? [...HEADLINES.serving(a).slice(0, 3), `a token of ${a.deployment}`] : [null, null, null, "none keeps it"]),
  program: (a) => [a.latency_us, a.lo_us, a.hi_us, "one run of the program"],
  training: (a) => [a.latency_us, a.lo_us, a.hi_us, "one training step"],
  serving: (a) => [
    ...["", "_lo", "_hi"].map((end) => a[`mean_tpot_ms${end}`] * 1e3),
    "a token of an answer (mean TPOT)",
  ],
};

function programAnswer(query, found) {
  const answers = found.filter((f) => f.answer);
  const times = answers.map(({ device, answer: a }) => [device, a.lo_us, a.hi_us, a.latency_us]);
  const drawn = rangeChart("Times with their 90 % intervals", "opcast-program", times, duration);
  const devices = card(
    { id: "devices", title: "Devices", says: "Time of one run, with its 90 % interval.", tools: [drawn.tool] },
    drawn.host,
    table(
      "Predicted times",
      ["device", "time", "90 % interval", "peak memory", "energy", "in domain"],
      found.map(({ device, answer, refusal }) =>
        answer
          ? [
              device,
              duration(answer.latency_us),
              between(answer.lo_us, answer.hi_us, duration),
              `${size(answer.peak_memory_bytes)}${answer.fits === false ? ", does not fit" : ""}`,
              joules(answer.energy_j),
              percent(answer.in_domain_share),
            ]
          : [device, "–", refusal.what, "", "", ""],
      ),
    ),
  );
  return [
    devices,
    changeCard(query, answers),
    ...answers.slice(0, 1).map(({ device, answer }) => kernelCard(query, device, answer)),
  ];
}

function kernelCard(query, device, answer) {
  const busy = (k) => k.latency_us * k.multiplicity;
  const list = [...answer.kernels].sort((a, b) => busy(b) - busy(a));
  const place = el("div", {});
  const full = el(
    "button",
    { type: "button", onclick: () => showReport(place, full, bodyOf("program", query, device)) },
    "Roofline, timeline, memory",
  );
  return card(
    {
      id: "kernels",
      title: `Kernels on ${device}`,
      says: `Of ${whole(list.length)}, the largest first.`,
      tools: [full],
    },
    table(
      "Kernels",
      ["kernel", "kind", "bound", "time", "share", "line"],
      list.slice(0, 15).map((k) => [
        k.name,
        k.kind,
        k.bound,
        duration(busy(k)),
        percent(busy(k) / answer.latency_us),
        (k.source_line || k.source_op || "").split("/").pop(),
      ]),
    ),
    notes(answer.notes),
    place,
  );
}

// The report of a program, as a page within the page; behind a token it is a file.
async function showReport(place, button, body) {
  button.disabled = true;
  try {
    const answer = await asked("/v1/report", body);
    const kept = answer.headers.get("Content-Location");
    if (DATA.secured) save("report.html", "text/html", await answer.text());
    else place.replaceChildren(el("iframe", { title: "Report of the program", src: kept }));
  } catch (refusal) {
    place.replaceChildren(refused(refusal));
  }
  button.disabled = false;
}

function trainingAnswer(query, [{ answer: a }]) {
  const parts = [
    ["computation", a.compute_us, "compute"],
    ["exposed communication", a.exposed_communication_us, "exposed"],
    ["bubble", a.bubble_us, "bubble"],
    ["host", a.host_us, "gap"],
  ].filter(([, us]) => us > 0);
  const memory = Object.entries(a.memory_bytes).filter(([name, held]) => name !== "total" && held > 0);
  const trained = a.run;
  const drawn = rangeChart(
    "Parts of a step",
    "opcast-step",
    parts.map(([name, us, shade]) => [name, 0, us, undefined, shade]),
    duration,
  );
  return [
    card(
      { id: "step", title: `${modelOf(query)} on ${a.devices} × ${a.device}` },
      el(
        "div",
        { class: "hero" },
        totalFigure(a.latency_us, a.lo_us, a.hi_us, "Predicted time of a step"),
        el(
          "div",
          { class: "tiles" },
          tile("Model FLOPs utilisation", percent(a.mfu), `of the ${a.mfu_format} peak`, a.mfu),
          tile("Tokens", `${count(a.tokens_per_s)}/s`, "of the whole cluster"),
          tile(
            "Memory of a device",
            size(a.memory_bytes_per_device),
            a.fits ? `fits in ${size(a.capacity_bytes)}` : `does not fit: ${a.change_to_fit}`,
            a.capacity_bytes ? a.memory_bytes_per_device / a.capacity_bytes : null,
          ),
          tile("Energy of a step", joules(a.energy_j), between(a.energy_lo_j, a.energy_hi_j, joules)),
          trained
            ? tile("Training", `${significant(trained.days)} days`, between(trained.days_lo, trained.days_hi, significant))
            : null,
          trained
            ? tile("Goodput", percent(trained.goodput), `${significant(trained.failures)} failures`, trained.goodput)
            : null,
          trained?.cost ? tile("Cost", dollars(trained.cost), `${dollars(a.cost)} a step`) : null,
        ),
      ),
      el("p", { class: "small soft" }, `Plan ${a.plan}; known: ${a.known}.`),
      notes(a.notes),
    ),
    card(
      { id: "parts", title: "Where the time goes", tools: [drawn.tool] },
      drawn.host,
      table(
        "Parts of a step",
        ["part", "time", "share"],
        parts.map(([name, us]) => [name, duration(us), percent(us / a.latency_us)]),
      ),
    ),
    card(
      { id: "memory", title: "Where the memory goes" },
      table(
        "Memory of the fullest device",
        ["part", "bytes", "share"],
        memory.map(([name, held]) => [name, size(held), percent(held / a.memory_bytes.total)]),
      ),
    ),
  ];
}

function servingAnswer(query, [{ answer: a }]) {
  const ms = (value) => duration(value * 1e3);
  const levels = ["mean", "median", "p90", "p99"];
  const metrics = ["ttft", "tpot", "itl", "e2el"];
  const ends = (key, show) => between(a[`${key}_lo`], a[`${key}_hi`], show);
  const rows = ["ttft", "tpot", "itl"].flatMap((m) => ["median", "p99"].map((level) => [m, level, `${level}_${m}_ms`]));
  const drawn = rangeChart(
    "Latencies with 90 % intervals",
    "opcast-serving",
    rows.map(([m, level, key]) => [`${m.toUpperCase()} ${level}`, ...["_lo", "_hi", ""].map((end) => a[key + end] * 1e3)]),
    duration,
  );
  const cell = (key) => [ms(a[key]), el("div", { class: "small soft" }, ends(key, ms))];
  // A tile of a figure that not every answer has.
  const figure = (key, text, show = significant) =>
    a[key] === undefined || a[key] === null ? null : tile(text, show(a[key]), ends(key, show));
  return [
    card(
      {
        id: "service",
        title: `${modelOf(query)} on ${a.gpus} × ${a.device}`,
        says: `${a.framework || "no engine named"}, plan ${a.plan}; known: ${a.known}.`,
      },
      el(
        "div",
        { class: "tiles" },
        figure("output_throughput", "Tokens a second"),
        figure("output_throughput_per_gpu", "Tokens a second of a device"),
        figure("request_throughput", "Requests a second"),
        figure("slo_attainment", "Requests within the objective", percent),
        figure("joules_per_output_token", "Energy of a token", joules),
        figure("dollars_per_million_tokens", "A million tokens", dollars),
      ),
      notes(a.notes),
    ),
    card(
      { id: "latencies", title: "Latencies", tools: [drawn.tool] },
      drawn.host,
      table(
        "Latencies with 90 % intervals",
        ["", ...levels],
        metrics.map((m) => [m.toUpperCase(), ...levels.map((level) => cell(`${level}_${m}_ms`))]),
      ),
    ),
  ];
}

const ANSWERS = {
  program: programAnswer,
  training: trainingAnswer,
  plans: plansAnswer,
  serving: servingAnswer,
  deployments: deploymentsAnswer,
};

// The server's refusal, in its words.
function refused({ what, message, where, hint }) {
  return el(
    "div",
    { class: "card refusal", role: "alert" },
    el("p", {}, el("b", {}, what || message)),
    where ? el("p", { class: "small soft" }, `at ${where}`) : null,
    hint ? el("p", { class: "small" }, hint) : null,
  );
}

// The same answer elsewhere: a link, a command, Python; and the answer as a file.
function elsewhere(kind, query, found) {
  const kept = found.map(({ device, answer, refusal }) => ({ device, ...(answer || { error: refusal.what }) }));
  const file = `opcast-${kind}`;
  return card(
    {
      id: "elsewhere",
      title: "The same elsewhere",
      tools: [
        button("JSON", () => save(`${file}.json`, "application/json", JSON.stringify(kept, null, 1))),
        button("CSV", () => save(`${file}.csv`, "text/csv", csv(found[0].answer?.front || kept))),
        button("Compare", () => pin(kind, query)),
      ],
    },
    el("pre", { class: "command", id: "command" }, commandOf(kind, query)),
    el(
      "details",
      { class: "sub small" },
      el("summary", {}, "Python"),
      el("pre", { class: "command", id: "python" }, pythonOf(kind, query)),
    ),
    Object.values(query).some((text) => text.length > LONGEST) || bytes
      ? el("p", { class: "small soft" }, "The program is too long for a link: the link holds the other choices.")
      : null,
  );
}

// Single figures as rows; lists, such as kernels, are in the JSON alone.
function csv(rows) {
  const single = (key) => rows.every((row) => typeof row[key] !== "object");
  const keys = [...new Set(rows.flatMap(Object.keys))].filter(single);
  const cell = (value) => {
    const text = String(value ?? "");
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const lines = [keys, ...rows.map((row) => keys.map((key) => row[key]))];
  return lines.map((row) => `${row.map(cell).join(",")}\n`).join("");
}

function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
