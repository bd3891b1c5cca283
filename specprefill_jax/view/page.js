"use strict";
(() => {
  const text = document.getElementById("text");
  const parts = [...text.children];
  const detail = document.getElementById("detail");
  const live = document.getElementById("live");
  const help = document.getElementById("help");
  const only = document.getElementById("only");
  const bars = [...document.querySelectorAll(".strip rect")];
  const kept = parts.filter((part) => part.matches("mark"));
  const byScore = [...kept].sort((a, b) => (a.dataset.r || Infinity) - (b.dataset.r || Infinity));
  let here = null;

  const facts = (part) => {
    const d = part.dataset;
    const state = part.matches("mark.f") ? "always kept" : part.matches("mark") ? "kept" : "dropped";
    const rows = [["Chunk", `${+d.c + 1} of ${text.dataset.chunks}`], ["Tokens", d.t], ["Main model", state]];
    if (d.v) rows.splice(2, 0, ["Score", d.v], ["Rank", `${d.r} of ${text.dataset.chunks}`]);
    return rows;
  };

  const show = (part) => {
    detail.replaceChildren(...facts(part).flatMap(([name, value]) => {
      const dt = document.createElement("dt");
      const dd = document.createElement("dd");
      dt.textContent = name;
      dd.textContent = value;
      return [dt, dd];
    }));
  };

  const barOf = (part) => bars.findLast((bar) => +bar.dataset.c <= +part.dataset.c);

  const go = (part, scroll = true) => {
    if (!part) return;
    if (here) {
      here.classList.remove("here");
      here.removeAttribute("aria-current");
      here.tabIndex = -1;
      barOf(here)?.classList.remove("here");
    }
    here = part;
    here.classList.add("here");
    here.setAttribute("aria-current", "true");
    here.tabIndex = 0;
    here.focus({ preventScroll: true });
    if (scroll) here.scrollIntoView({ block: "nearest" });
    barOf(here)?.classList.add("here");
    show(here);
    live.textContent = facts(here).map((row) => row.join(" ")).join(", ");
  };

  // From nowhere, the next part is the first one in view or below it, and the one before is the last above.
  const step = (list, by) => {
    if (here && list.includes(here)) return go(list[list.indexOf(here) + by]);
    const from = here ? parts.indexOf(here) : parts.findIndex((part) => part.getBoundingClientRect().bottom > 0);
    const after = list.findIndex((part) => parts.indexOf(part) >= from);
    const at = after < 0 ? list.length : after;
    go(list[by > 0 ? at : at - 1]);
  };

  const stepScore = (by) => go(byScore[here && byScore.includes(here) ? byScore.indexOf(here) + by : 0]);

  const toggleOnly = () => {
    const on = document.body.classList.toggle("only");
    only.setAttribute("aria-pressed", String(on));
    if (here) here.scrollIntoView({ block: "center" });
  };

  const toggleTheme = () => {
    const root = document.documentElement;
    const now = root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.style.colorScheme = now === "dark" ? "light" : "dark";
  };

  const actions = {
    next: () => step(kept, 1),
    previous: () => step(kept, -1),
    better: () => stepScore(-1),
    worse: () => stepScore(1),
    only: toggleOnly,
    theme: toggleTheme,
    help: () => (help.open ? help.close() : help.showModal()),
  };
  const keys = {
    j: actions.next, ArrowRight: actions.next, k: actions.previous, ArrowLeft: actions.previous,
    J: () => step(parts, 1), K: () => step(parts, -1), n: actions.worse, p: actions.better,
    g: () => go(kept[0]), G: () => go(kept.at(-1)), o: actions.only, t: actions.theme, "?": actions.help,
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    if (help.open && event.key !== "?") return;
    const action = keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  document.querySelectorAll("[data-do]").forEach((button) => button.addEventListener("click", actions[button.dataset.do]));
  text.addEventListener("click", (event) => {
    if (!getSelection().isCollapsed) return;
    const part = event.target.closest("#text > *");
    if (part) go(part, false);
  });
  text.addEventListener("mouseover", (event) => {
    const part = event.target.closest("#text > *");
    if (part) show(part);
  });
  text.addEventListener("mouseleave", () => { if (here) show(here); });
  document.querySelector(".strip svg")?.addEventListener("click", (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const bar = bars[Math.min(bars.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * bars.length)))];
    go(parts.find((part) => +part.dataset.c >= +bar.dataset.c));
  });
  if (kept[0]) kept[0].tabIndex = 0;

  // map.html#12 opens at chunk 12, counted from 1 as everywhere on the page.
  const asked = /^#(\d+)$/.exec(location.hash);
  if (asked) go(parts.find((part) => +part.dataset.c === asked[1] - 1));
})();
