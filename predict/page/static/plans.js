// Answers of searches: plans of a training step, and deployments of a model that is served.

const modelOf = (query) => (query.config ? "the model of config.json" : query.workload);

// Days and dollars that a plan takes for so many tokens; the latter if a price was given.
function trainingOf(query, { tokens_per_s, latency_us, lo_us, hi_us, cost }, tokensOfStep) {
  const tokens = Number(query.tokens) * 1e9;
  if (!tokens) return null;
  const days = tokens / tokens_per_s / DAY_S;
  const ends = [lo_us, hi_us].map((us) => (days * us) / latency_us);
  return { days, ends, dollars: cost ? (cost * tokens) / tokensOfStep : null };
}

function plansAnswer(query, [{ answer: a }]) {
  const says = `${whole(a.judged)} plans, ${whole(a.fits)} fit the memory; ${whole(a.front.length)} that no other beats`;
  if (!a.front.length) return [card({ id: "plans", title: "No plan fits", says }, el("p", {}, a.nearest_miss))];
  const { grid, ...asked } = query;
  const points = a.front.map((row, i) => ({
    x: row.latency_us,
    y: row.memory_bytes_per_device / 2 ** 30,
    text: row.plan,
    meant: !i,
  }));
  const front = pointChart(
    "Memory against time of the plans",
    "opcast-plans",
    points,
    { title: "time of a step", show: duration },
    { title: "memory of a device", show: (value) => `${significant(value)} GiB` },
  );
  const trained = a.front.map((row) => trainingOf(query, row, a.tokens));
  const priced = a.front[0].cost !== undefined;
  const heads = ["plan", "step", "90 % interval", "memory", "MFU", "energy"];
  if (priced) heads.push("cost of a step");
  if (trained[0]) heads.push("days", ...(priced ? ["cost in all"] : []));
  return [
    card(
      { id: "plans", title: `${modelOf(query)} on ${query.cluster}`, says: `${says}, the fastest first.`, tools: [front.tool] },
      front.host,
      table(
        "Plans",
        heads,
        a.front.map((row, i) => [
          el("a", { href: linkOf("training", { ...asked, plan: row.plan }) }, row.plan),
          duration(row.latency_us),
          between(row.lo_us, row.hi_us, duration),
          size(row.memory_bytes_per_device),
          percent(row.mfu),
          joules(row.energy_j),
          ...(priced ? [dollars(row.cost)] : []),
          ...(trained[i] ? [significant(trained[i].days)] : []),
          ...(trained[i] && priced ? [dollars(trained[i].dollars)] : []),
        ]),
      ),
      notes(a.notes),
    ),
  ];
}

function deploymentsAnswer(query, [{ answer: a }]) {
  const ms = (value) => duration(value * 1e3);
  const best = a.best;
  const name = (row) => `${row.deployment}${row.max_batch ? `, ${row.max_batch} sequences` : ""}, ${row.gpus} × ${row.device}`;
  const says = `${whole(a.judged)} deployments simulated (${whole(a.screened)} of them without intervals, since they cannot win by estimate), ${whole(a.pruned)} left out, ${whole(Object.keys(a.refused).length)} do not fit.`;
  const ends = (key, show) => between(best[`${key}_lo`], best[`${key}_hi`], show);
  const figure = (key, text, show) =>
    best[key] === undefined || best[key] === null ? null : tile(text, show(best[key]), ends(key, show));
  const found = best
    ? [
        el(
          "div",
          { class: "tiles" },
          figure("output_throughput_per_gpu", "Tokens a second of a device", significant),
          figure("p90_ttft_ms", "First token, 90th percentile", ms),
          figure("p90_tpot_ms", "A token, 90th percentile", ms),
          tile("Keeps the objective", percent(best.keeps_slo_probability), "how likely"),
          figure("dollars_per_million_tokens", "A million tokens", dollars),
          figure("joules_per_output_token", "Energy of a token", joules),
        ),
        a.by_estimate_only && a.surest ? el("p", { class: "small" }, `Surest to keep it: ${name(a.surest)}.`) : null,
        listOf(a.reasons, "Because "),
      ]
    : [listOf(a.nearest, ""), a.fewest_devices ? el("p", {}, `It fits on ${a.fewest_devices} devices.`) : null];
  return [
    card(
      { id: "best", title: best ? `${modelOf(query)}: ${name(best)}` : "No deployment keeps the objective", says },
      found,
    ),
    ...(best ? [launchCard(a)] : []),
    ...(a.front.length ? [frontCard(a, name, ms)] : []),
  ];
}

const listOf = (said, before) =>
  said.length ? el("ul", { class: "small" }, said.map((reason) => el("li", {}, before, reason))) : null;

// How the best is launched, with what each flag is for.
function launchCard(a) {
  return card(
    { id: "launch", title: "Launch commands" },
    Object.entries(a.commands).map(([name, command]) =>
      el(
        "div",
        { class: "sub" },
        el("h3", {}, name),
        el("pre", { class: "command" }, command),
        el(
          "details",
          { class: "small" },
          el("summary", {}, "Flags"),
          table(`Flags of ${name}`, ["flag", "value", "why"], a.launch[name].map((row) => [row.flag, row.value, row.why])),
        ),
      ),
    ),
  );
}

function frontCard(a, name, ms) {
  const points = a.front.map((row) => ({
    x: row.p90_tpot_ms * 1e3,
    y: row.tokens_per_s_per_gpu,
    text: name(row),
    meant: a.best && row.deployment === a.best.deployment && row.max_batch === a.best.max_batch,
  }));
  const front = pointChart(
    "Throughput against latency of the deployments",
    "opcast-deployments",
    points,
    { title: "a token of an answer, 90th percentile", show: duration },
    { title: "tokens a second of a device", show: count },
  );
  return card(
    { id: "front", title: "Deployments that no other beats", tools: [front.tool] },
    front.host,
    table(
      "Deployments",
      ["deployment", "tokens/s a device", "TTFT p90", "TPOT p90", "in objective", "sure"],
      a.front.map((row) => [
        name(row),
        significant(row.tokens_per_s_per_gpu),
        ms(row.p90_ttft_ms),
        ms(row.p90_tpot_ms),
        percent(row.slo_attainment ?? 1),
        percent(row.keeps_slo_probability),
      ]),
    ),
  );
}
