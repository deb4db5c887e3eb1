// What all pages share: elements, numbers with units, colours, the light and the dark mode, tooltips.

const DATA = JSON.parse(document.getElementById("data").textContent);

// An element. Strings become text, never markup; styles are set one by one, as the policy wants.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function significant(value, digits = 3) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)) + 1e-9));
  return value.toFixed(Math.min(places, 8));
}

// A value with the largest unit that leaves at least one before the point.
function withUnit(value, units, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  let [scale, unit] = units[units.length - 1];
  for (const [own, name] of units) {
    if (size >= own * 0.9995) {
      [scale, unit] = [own, name];
      break;
    }
  }
  return `${significant(value / scale, digits)}\u00a0${unit}`;
}

const TIMES = [
  [1e6, "s"],
  [1e3, "ms"],
  [1, "µs"],
  [1e-3, "ns"],
];
const SIZES = [
  [2 ** 40, "TiB"],
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
  [1, "B"],
];
const COUNTS = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
  [1, ""],
];
const duration = (us) => (us === 0 ? "0" : withUnit(us, TIMES));
const size = (bytes) => (bytes === 0 ? "0\u00a0B" : withUnit(bytes, SIZES));
const count = (value) => (value === 0 ? "0" : withUnit(value, COUNTS).replace(/\u00a0$/, ""));
const rate = (value, unit) => (value ? withUnit(value, COUNTS) + unit : "0\u00a0" + unit);
const percent = (share) => {
  if (share === null || !Number.isFinite(share)) return "–";
  const value = 100 * share,
    size = Math.abs(value);
  if (size > 0 && size < 0.005) return "<\u00a00.01\u00a0%";
  return `${size >= 99.95 || value === 0 ? value.toFixed(0) : value.toFixed(size < 0.095 ? 2 : 1)}\u00a0%`;
};
const whole = (value) => Math.round(value).toLocaleString("en-GB");

const sum = (values) => values.reduce((a, b) => a + b, 0);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// Sums of values by key, largest first.
function grouped(keys, values) {
  const found = new Map();
  keys.forEach((key, i) => found.set(key, (found.get(key) || 0) + values[i]));
  return [...found].sort((a, b) => b[1] - a[1]);
}

// Colours come from the style sheet, so that drawings follow the mode.
const shades = new Map();
function colour(name) {
  if (!shades.has(name)) {
    const found = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    shades.set(name, found || colour("rest"));
  }
  return shades.get(name);
}
const KNOWN_COLOURS = new Set([
  "gemm",
  "attention",
  "conv",
  "fusion",
  "reduce",
  "copy",
  "gather_scatter",
  "sort",
  "custom_call",
  "collective",
  "control",
  "gap",
  "forward",
  "backward",
  "recomputed",
  "compute",
  "memory",
  "latency",
  "communication",
  "weights",
  "exposed",
  "update",
  "bubble",
  "rest",
  "accent",
]);
const variable = (name) => `var(--${KNOWN_COLOURS.has(name) ? name : "rest"})`;
const WHEEL = [
  "gemm",
  "reduce",
  "fusion",
  "conv",
  "gather_scatter",
  "custom_call",
  "collective",
  "sort",
  "copy",
];

const redraws = new Set();
function redrawAll() {
  shades.clear();
  for (const draw of redraws) draw();
}

const MODES = ["auto", "light", "dark"];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let mode = "auto";
try {
  mode = MODES.find((m) => m === localStorage.getItem("opcast-mode")) || "auto";
} catch {
  /* no storage */
}

function applyMode(printing = false) {
  const dark = !printing && (mode === "dark" || (mode === "auto" && prefersDark.matches));
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  redrawAll();
}
prefersDark.addEventListener("change", () => applyMode());
addEventListener("beforeprint", () => applyMode(true));
addEventListener("afterprint", () => applyMode());

function modeSwitch() {
  return choice(
    "Colours",
    MODES.map((m) => [m, m[0].toUpperCase() + m.slice(1)]),
    mode,
    (chosen) => {
      mode = chosen;
      try {
        localStorage.setItem("opcast-mode", mode);
      } catch {
        /* no storage */
      }
      applyMode();
    },
  );
}

// Buttons of which one is pressed.
function choice(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) =>
    el(
      "button",
      {
        type: "button",
        "aria-pressed": String(value === chosen),
        "data-value": value,
        onclick: () => {
          buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.value === value)));
          onChoose(value);
        },
      },
      text,
    ),
  );
  return el("div", { class: "switch", role: "group", "aria-label": label }, buttons);
}

// A list to choose one of.
function picker(label, options, onChange) {
  const node = el(
    "select",
    { "aria-label": label, onchange: () => onChange(node.value) },
    options.map(([value, text]) => el("option", { value }, text)),
  );
  return node;
}

const tipNode = el("div", { id: "tip", role: "status", hidden: true });
function showTip(x, y, lines) {
  tipNode.replaceChildren(el("b", {}, lines[0]), ...lines.slice(1).map((line) => el("div", {}, line)));
  tipNode.hidden = false;
  const { width, height } = tipNode.getBoundingClientRect();
  tipNode.style.left = `${clamp(x + 14, 6, Math.max(6, innerWidth - width - 6))}px`;
  tipNode.style.top = `${y + 18 + height > innerHeight ? Math.max(6, y - height - 12) : y + 18}px`;
}
function hideTip() {
  tipNode.hidden = true;
}

// A section of the page: heading, a sentence, tools at its right, contents. Link: its name in the navigation.
const sections = [];
function card({ id, title, link, says, tools }, ...children) {
  if (link) sections.push([id, link]);
  return el(
    "section",
    { class: "card", id, "aria-labelledby": title ? `${id}-title` : null },
    title &&
      el(
        "div",
        { class: "head" },
        el("div", {}, el("h2", { id: `${id}-title` }, title), says ? el("p", { class: "says" }, says) : null),
        tools && tools.length ? el("div", { class: "tools" }, tools) : null,
      ),
    children,
  );
}

// Notes of this run, and below them in grey those that hold for every run of the model on the device.
function notes(all, standing = []) {
  const own = all.filter((n) => !standing.includes(n));
  const rest = all.filter((n) => standing.includes(n));
  if (!own.length || !rest.length) return noteBox(all, own.length ? "note" : "note standing");
  return el("div", {}, noteBox(own, "note"), noteBox(rest, "note standing"));
}

function noteBox(list, kind) {
  if (!list.length) return null;
  return el(
    "div",
    { class: kind, role: "note" },
    list.length === 1
      ? el("p", {}, el("b", {}, "Note: "), list[0])
      : el(
          "ul",
          {},
          list.map((n) => el("li", {}, n)),
        ),
  );
}

function tile(label, value, more, share) {
  return el(
    "div",
    { class: "tile" },
    el("div", { class: "label" }, label),
    el("div", { class: "value" }, value),
    share === undefined || share === null
      ? null
      : el(
          "div",
          { class: "meter" },
          el("i", { class: share > 1 ? "over" : null, style: { width: `${clamp(share, 0, 1) * 100}%` } }),
        ),
    more ? el("div", { class: "more" }, more) : null,
  );
}

// A large time with its interval drawn below.
function totalFigure(us, lo, hi, what) {
  const [value, unit] = duration(us).split("\u00a0");
  const from = lo - 0.15 * (hi - lo),
    width = 1.3 * (hi - lo) || 1;
  const at = (v) => `${((v - from) / width) * 100}%`;
  return el(
    "div",
    { class: "total" },
    el("div", { class: "soft small" }, what),
    el("div", { class: "figure" }, value, el("span", { class: "unit" }, unit || "")),
    el(
      "div",
      {
        class: "interval",
        role: "img",
        "aria-label": `90 % interval from ${duration(lo)} to ${duration(hi)}`,
      },
      el("i", { style: { left: at(lo), right: `calc(100% - ${at(hi)})` } }),
      el("b", { style: { left: at(us) } }),
    ),
    el(
      "div",
      { class: "ends" },
      el("span", {}, duration(lo)),
      el("span", {}, "90 % interval"),
      el("span", {}, duration(hi)),
    ),
  );
}

// A table that scrolls within itself; cells are texts or nodes. Numbers stand in all columns but the first,
// which names the rows: head makes its cells.
function scrollTable(caption, heads, rows, head = (cell) => el("td", { class: "name" }, cell)) {
  const titles = heads.map((title, place) => el("th", { scope: "col", class: place ? "n" : null }, title));
  const cellsOf = ([first, ...others]) => [head(first), others.map((cell) => el("td", { class: "n" }, cell))];
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el("caption", { class: "sr" }, caption),
      el("thead", {}, el("tr", {}, titles)),
      el(
        "tbody",
        {},
        rows.map((cells) => el("tr", {}, cellsOf(cells))),
      ),
    ),
  );
}

// Puts the page together: head, navigation, main part, foot.
function assemblePage({ brand, title, facts, navigation, links, main, foot }) {
  const head = el(
    "header",
    { class: "top" },
    el(
      "div",
      { class: "wrap" },
      el(
        "div",
        {},
        el("div", { class: "brand" }, el("b", {}, "opcast"), " · ", brand),
        el("h1", {}, title),
        facts.length
          ? el(
              "div",
              { class: "facts" },
              facts.map(([name, value]) => el("span", { class: "chip" }, name, " ", el("b", {}, value))),
            )
          : null,
      ),
      modeSwitch(),
    ),
  );
  const nav = el("nav", { class: "sections", "aria-label": navigation }, el("div", { class: "wrap" }, links));
  const end = el("footer", { class: "wrap" }, foot);
  document.getElementById("page").replaceChildren(head, nav, main, end, tipNode);
}

// A page of sections, whose links are its navigation.
function showPage({ brand, title, facts, body, foot }) {
  const links = sections.map(([id, name]) => el("a", { href: `#${id}` }, name));
  const main = el("main", { class: "wrap" }, body);
  assemblePage({ brand, title, facts, navigation: "Sections", links, main, foot });
  followSections(links);
  applyMode();
}

// Marks the link of the section that is in view.
function followSections(links) {
  const targets = sections.map(([id]) => document.getElementById(id));
  const follow = () => {
    const passed = targets.filter((t) => t.getBoundingClientRect().top < 140).length;
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 4;
    const current = atEnd ? links.length - 1 : Math.max(0, passed - 1);
    links.forEach((link, i) => {
      if (i === current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    });
  };
  addEventListener("scroll", follow, { passive: true });
  follow();
}
