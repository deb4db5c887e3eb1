// The page of a server: a tab for each kind of question, and questions side by side.

const TABS = [
  ["program", "Program"],
  ["training", "Training"],
  ["plans", "Find a plan"],
  ["serving", "Serving"],
  ["deployments", "Find a deployment"],
  ["compare", "Compare"],
];
const SAYS = {
  program: "How long a StableHLO or HLO program takes on each device.",
  training: "A step of a model on a cluster under a plan: time, memory, cost.",
  plans: "The parallel plans of a model on a cluster that no other beats in time, memory, energy and cost.",
  deployments: "Engines, plans and batches of a model that is served: the cheapest that keeps an objective.",
  serving: "An engine under load: latencies, throughput, cost.",
  compare: "Questions that were kept with “Compare”, asked again and side by side.",
};
const main = el("main", { class: "wrap" });
const links = TABS.map(([kind, text]) => el("a", { href: `#${kind}`, "data-kind": kind }, text));
// A later question must not be covered by the answer to an earlier one.
let turn = 0;

async function ask(kind, query) {
  const path = PATHS[kind];
  const devices = kind === "program" ? devicesOf(query) : [query.device || query.cluster];
  if (!devices.length) throw new Error("tick at least one device");
  const one = async (device) => {
    try {
      const answer = await asked(path, bodyOf(kind, query, kind === "program" ? device : undefined));
      return { device, answer: await answer.json() };
    } catch (refusal) {
      const { where, hint } = refusal;
      return { device, refusal: { what: refusal.what || refusal.message, where, hint } };
    }
  };
  const found = [];
  // One after the other: a server has few workers, and others may ask as well.
  for (const device of devices) found.push(await one(device));
  if (found.every((f) => f.refusal)) throw Object.assign(new Error(found[0].refusal.what), found[0].refusal);
  return found;
}

async function showAnswer(place, kind, query) {
  const own = ++turn;
  place.setAttribute("aria-busy", "true");
  place.replaceChildren(el("p", { class: "soft" }, "Asking …"));
  let shown;
  try {
    const found = await ask(kind, query);
    shown = [...ANSWERS[kind](query, found), elsewhere(kind, query, found)];
  } catch (refusal) {
    shown = [refused(refusal)];
  }
  if (own !== turn) return;
  place.removeAttribute("aria-busy");
  place.replaceChildren(...shown);
}

function showQuestion(kind, given) {
  const empty = !Object.keys(given).length;
  const query = empty ? firstQuestion(kind) : given;
  const place = el("div", { class: "answer", "aria-live": "polite" });
  const form = questionForm(kind, query, (typed) => {
    history.replaceState(null, "", linkOf(kind, typed));
    showAnswer(place, kind, typed);
  });
  const text = TABS.find(([own]) => own === kind)[1];
  main.replaceChildren(card({ id: "question", title: text, says: SAYS[kind] }, form), place);
  // A link reproduces its answer.
  if (!empty) showAnswer(place, kind, query);
}

// Questions kept for comparison are part of the link, too.
let pinned = [];

function pin(kind, query) {
  pinned.push(linkOf(kind, query));
  location.hash = compareLink();
}
const compareLink = () => `#compare?${new URLSearchParams(pinned.map((link) => ["q", link]))}`;

async function showCompared(given) {
  pinned = given;
  const place = el("div", { class: "answer", "aria-live": "polite" });
  main.replaceChildren(card({ id: "question", title: "Compare", says: SAYS.compare }), place);
  const own = ++turn;
  if (!pinned.length) {
    const none = "None is kept yet: ask one, then press “Compare” below its answer.";
    place.replaceChildren(el("p", { class: "soft" }, none));
    return;
  }
  const rows = [];
  const times = [];
  for (const link of pinned) {
    const [kind, query] = questionOf(link);
    const words = el("a", { href: link }, commandOf(kind, query));
    const drop = button("Remove", () => {
      pinned = pinned.filter((other) => other !== link);
      location.hash = compareLink();
    });
    try {
      for (const { device, answer, refusal } of await ask(kind, query)) {
        if (refusal) rows.push([words, device, "–", refusal.what, "", drop]);
        else {
          const [us, lo, hi, what] = HEADLINES[kind](answer);
          if (us) times.push([`${times.length + 1}: ${device}`, lo, hi, us]);
          rows.push([words.cloneNode(true), device, duration(us), between(lo, hi, duration), what, drop]);
        }
      }
    } catch (refusal) {
      rows.push([words, "", "–", refusal.what || refusal.message, "", drop]);
    }
  }
  if (own !== turn) return;
  const drawn = times.length ? rangeChart("Times with their 90 % intervals", "opcast-compare", times, duration) : null;
  const heads = ["question", "on", "time", "90 % interval", "of", ""];
  place.replaceChildren(card({ id: "compared", title: "Side by side", tools: [drawn?.tool] }, drawn?.host, table("Questions side by side", heads, rows)));
}

const linksOf = (hash) => new URLSearchParams(hash.split("?").slice(1).join("?")).getAll("q");

function route() {
  const [kind, query] = questionOf(location.hash || "#program");
  const known = TABS.some(([own]) => own === kind) ? kind : "program";
  links.forEach((link) => {
    if (link.dataset.kind === known) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else link.removeAttribute("aria-current");
  });
  if (known === "compare") showCompared(linksOf(location.hash));
  else showQuestion(known, query);
}

assemblePage({
  brand: DATA.version,
  title: "How long will it take?",
  facts: [],
  navigation: "Questions",
  links,
  main,
  foot: ["For scripts: ", el("a", { href: "/docs" }, "the same over HTTP"), "."],
});
addEventListener("hashchange", route);
applyMode();
route();
