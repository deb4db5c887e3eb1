// The page of a simulated service.

const WORDS = {
  ttft: "Time to the first token",
  tpot: "Time per further token",
  itl: "Time between tokens",
  e2e: "Whole request",
};

function overview() {
  const [, mean] = DATA.latencies.find(([name]) => name === "ttft");
  const [, token] = DATA.latencies.find(([name]) => name === "tpot");
  const [us, lo, hi] = mean[0];
  return card(
    { id: "overview", link: "Overview" },
    el(
      "div",
      { class: "hero" },
      totalFigure(us, lo, hi, `Mean time to the first token under ${DATA.framework}`),
      el(
        "div",
        { class: "tiles" },
        tile(
          "Output tokens",
          `${count(DATA.tokens[0])}/s`,
          `90 %: ${count(DATA.tokens[1])} to ${count(DATA.tokens[2])}`,
        ),
        tile("Output tokens of a device", `${count(DATA.per_device)}/s`),
        tile("Requests", `${significant(DATA.requests)}/s`),
        tile("Time per further token", duration(token[0][0]), `90 %: ${duration(token[0][1])} to ${duration(token[0][2])}`),
        DATA.good === null ? null : tile("Requests that keep the SLO", percent(DATA.good), "", DATA.good),
        DATA.states.kv_occupancy_mean === undefined
          ? null
          : tile(
              "Cache in use",
              percent(DATA.states.kv_occupancy_mean),
              `at most ${percent(DATA.states.kv_occupancy_max)}; ${whole(DATA.evicted)} evictions`,
              DATA.states.kv_occupancy_mean,
            ),
      ),
    ),
  );
}

function figures() {
  const latencies = card(
    { id: "latencies", title: "Latencies", link: "Latencies", says: "With the ends of their 90 % intervals." },
    scrollTable(
      "Latencies",
      ["latency", ...DATA.levels],
      DATA.latencies.map(([name, values]) => [
        WORDS[name],
        ...values.map(([us, lo, hi]) => `${duration(us)} (${duration(lo)} – ${duration(hi)})`),
      ]),
    ),
  );
  const whole_ = sum(DATA.memory.map(([, bytes]) => bytes));
  const memory = card(
    { id: "memory", title: "Memory of a device", link: "Memory" },
    scrollTable(
      "Memory by use",
      ["use", "bytes", "share"],
      DATA.memory.map(([name, bytes]) => [name, size(bytes), percent(bytes / whole_)]),
    ),
  );
  return [latencies, memory];
}

// Curves of all engines over time.
function curves(id, title, says, name, format) {
  const most = Math.max(name === "held" ? 0.01 : 1, ...DATA.engines.map((engine) => Math.max(0, ...engine[name])));
  const end = DATA.makespan;
  const drawn = canvas(`${title} over time`, 150, (context, width, height) => {
    const box = { left: 56, right: width - 8, top: 10, bottom: height - 26 };
    const x = (us) => box.left + (us / end) * (box.right - box.left);
    const y = (value) => box.bottom - (value / most) * (box.bottom - box.top);
    axes(context, box, x, y, end, most, format);
    context.lineWidth = 1.2;
    DATA.engines.forEach((engine, place) => {
      context.strokeStyle = colour(WHEEL[place % WHEEL.length]);
      context.beginPath();
      engine.time.forEach((us, i) => context.lineTo(x(us), y(engine[name][i])));
      context.stroke();
    });
  });
  return card({ id, title, says }, drawn.host);
}

function axes(context, box, x, y, end, most, format) {
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of linearTicks(0, most, 4)) {
    line(context, box.left, y(tick), box.right, y(tick));
    context.fillText(format(tick || 0), box.left - 7, y(tick));
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const tick of linearTicks(0, end, Math.floor((box.right - box.left) / 90)))
    context.fillText(duration(tick || 0), x(tick), box.bottom + 7);
}

// Latency of every request by the time at which it was sent.
function requests() {
  const most = Math.max(1, ...DATA.e2e),
    end = DATA.makespan;
  const drawn = canvas("Latencies of requests", 240, (context, width, height) => {
    const box = { left: 64, right: width - 8, top: 10, bottom: height - 26 };
    const x = (us) => box.left + (us / end) * (box.right - box.left);
    const y = (value) => box.bottom - (value / most) * (box.bottom - box.top);
    axes(context, box, x, y, end, most, duration);
    DATA.sent.forEach((us, i) => {
      disc(context, [x(us), y(DATA.e2e[i])], 1.5, colour("rest"));
      disc(context, [x(us), y(DATA.ttft[i])], 1.5, colour("accent"));
    });
  });
  const left = DATA.left_out ? ` ${whole(DATA.left_out)} requests between them are left out.` : "";
  return card(
    {
      id: "requests",
      title: "Requests",
      link: "Requests",
      says: `By the time at which each was sent: until its first token, and until its last one (grey).${left}`,
    },
    drawn.host,
  );
}

showPage({
  brand: "predicted service",
  title: DATA.title,
  facts: [
    ["engines", DATA.plan],
    ["framework", DATA.framework],
  ],
  body: [
    overview(),
    notes(DATA.notes),
    ...figures(),
    requests(),
    curves("batch", "Batch", "Sequences of a pass, a line for each engine.", "batch", whole),
    curves("queue", "Queue", "Requests that wait for an engine.", "waiting", whole),
    curves("cache", "Cache in use", "Share of the tokens that the cache holds.", "held", percent),
  ].filter(Boolean),
  foot: ["Predicted by opcast; nobody ran the service."],
});
