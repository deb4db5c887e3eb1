// The page of a step on a cluster.

const SHADES = {
  computation: "compute",
  "exposed communication": "exposed",
  bubble: "bubble",
  host: "gap",
  forward: "forward",
  backward: "backward",
  "weight gradients": "weights",
  exposed: "exposed",
  update: "update",
};
const S = DATA.spans,
  TOTAL = DATA.total.us;
const timeOf = (list) => sum(list.map(([, us]) => us));

function overview() {
  const total = DATA.memory.find(([name]) => name === "total");
  const spread = new Map(DATA.spread);
  return card(
    { id: "overview", link: "Overview" },
    el(
      "div",
      { class: "hero" },
      totalFigure(
        TOTAL,
        DATA.total.lo,
        DATA.total.hi,
        `Predicted time of a step on ${DATA.devices} × ${DATA.device}`,
      ),
      el(
        "div",
        { class: "tiles" },
        tile(
          "A device achieves",
          rate(DATA.flops, "FLOP/s"),
          `${percent(DATA.flops / DATA.peak)} of its ${DATA.peakFormat} peak`,
          DATA.flops / DATA.peak,
        ),
        tile("Tokens", `${count(DATA.tokens)}/s`, "of the whole cluster"),
        total
          ? tile(
              "Memory of the fullest device",
              size(total[1]),
              DATA.capacity
                ? `${DATA.fits ? "fits" : "does not fit"} in ${size(DATA.capacity)}`
                : "capacity not known",
              DATA.capacity ? total[1] / DATA.capacity : null,
            )
          : null,
        DATA.breakdown.map(([name, us]) =>
          tile(
            name[0].toUpperCase() + name.slice(1),
            duration(us),
            `${percent(us / TOTAL)} of the step`,
            us / TOTAL,
          ),
        ),
        spread.size
          ? tile(
              "With jitter",
              duration(spread.get("p50_us")),
              `5 to 95 %: ${duration(spread.get("p5_us"))} – ${duration(spread.get("p95_us"))}`,
            )
          : null,
      ),
    ),
  );
}

// The run that was asked about, in the words of the command.
const runCard = () =>
  DATA.run.length ? card({ id: "run", title: "The run", link: "Run" }, DATA.run.map((line) => el("p", {}, line))) : null;

function breakdownCards() {
  const parts = DATA.breakdown.map(([name, us]) => [name, us, SHADES[name]]);
  const hidden = DATA.communication.map(([name, us]) => [name, us, "communication"]);
  const parted = card(
    { id: "parts", title: "Where the time goes", link: "Breakdown" },
    stackedBar(parts),
    el("div", { class: "sub" }, barTable("Parts of the step", parts, TOTAL)),
    hidden.length
      ? el(
          "div",
          { class: "sub" },
          el("h3", {}, "Communication, hidden or not"),
          barTable("Communication by kind", hidden, TOTAL, "kind"),
        )
      : null,
  );
  const memory = DATA.memory.filter(([name, bytes]) => name !== "total" && bytes > 0),
    most = Math.max(...memory.map(([, bytes]) => bytes), 1);
  const used = card(
    { id: "memory", title: "Memory of the fullest device", link: "Memory" },
    el(
      "table",
      { class: "bars" },
      el("caption", { class: "sr" }, "Memory by use"),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "use"),
          el("th", {}),
          el("th", { class: "n", scope: "col" }, "bytes"),
          el("th", { class: "n", scope: "col" }, "of capacity"),
        ),
      ),
      el(
        "tbody",
        {},
        memory.map(([name, bytes]) =>
          el(
            "tr",
            {},
            el("td", { class: "name" }, name),
            barCell(bytes / most, "memory"),
            el("td", { class: "n" }, size(bytes)),
            el("td", { class: "n" }, DATA.capacity ? percent(bytes / DATA.capacity) : "–"),
          ),
        ),
      ),
    ),
  );
  const operators = DATA.operators.map(([name, us]) => [name, us, "accent"]);
  const right = card(
    { id: "operators", title: "Operators of the busiest stage" },
    el("div", { class: "scroll" }, barTable("Operators", operators, timeOf(DATA.operators), "operator")),
  );
  const left = el("div", { class: "column" }, parted, used);
  return el("div", { class: "two" }, left, right);
}

function timelineCard() {
  const stages = [...new Set(S.stage)].sort((a, b) => a - b);
  const tracks = stages.map((stage) => {
    const own = S.start.map((_, i) => i).filter((i) => S.stage[i] === stage);
    return {
      name: `stage ${stage}`,
      main: stages.length <= 8,
      start: own.map((i) => S.start[i]),
      end: own.map((i) => S.end[i]),
      shade: (s) => SHADES[S.words[S.kind[own[s]]]] || "rest",
      text: (s) => S.words[S.name[own[s]]],
      tip: (s) => [
        S.words[S.name[own[s]]],
        `${S.words[S.kind[own[s]]]}, stage ${stage}`,
        duration(S.end[own[s]] - S.start[own[s]]),
      ],
    };
  });
  const drawn = timeline({
    label: `Timeline of ${stages.length} stages`,
    tracks,
    end: Math.max(TOTAL, ...S.end),
    curve: null,
  });
  const kinds = [...new Set(S.kind)].map((code) => S.words[code]);
  const left = S.left_out ? ` ${whole(S.left_out)} later spans are left out.` : "";
  return card(
    {
      id: "timeline",
      title: "Timeline",
      link: "Timeline",
      says: `Tasks of each pipeline stage; empty is bubble. Exposed communication is shown at a task's end.${left}`,
      tools: drawn.tools,
    },
    drawn.body,
    el(
      "div",
      { class: "legend" },
      kinds.map((name) =>
        el(
          "span",
          {},
          el("i", { class: "key", style: { background: variable(SHADES[name] || "rest") } }),
          name,
        ),
      ),
    ),
  );
}

showPage({
  brand: "predicted step on a cluster",
  title: DATA.title,
  facts: [
    ["cluster", DATA.cluster],
    ["plan", DATA.plan],
    ...Object.entries(DATA.sizes).map(([name, value]) => [name, whole(value)]),
  ],
  body: [overview(), runCard(), notes(DATA.notes), breakdownCards(), timelineCard()].filter(Boolean),
  foot: ["Predicted by opcast; nobody ran the step."],
});
