"use strict";
// The sections as the server sent them, to see which have changed since.
const sent = new Map();
for (const section of document.querySelectorAll("main > section")) sent.set(section.id, section.outerHTML);
{% include "page.js" %}

// By tag as well: a section has the id that follows from the name of its table, such as "period".
const runs = document.querySelector("table#runs");
const filter = document.querySelector("input#filter");

// Show the runs whose rows have all words of the filter.
function filterRuns() {
  const words = filter.value.toLowerCase().split(/\s+/);
  const rows = [...runs.tBodies[0].rows];
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
  const shown = rows.filter((row) => !row.hidden).length;
  const count = shown < rows.length ? `${shown} of ${rows.length}` : rows.length;
  document.querySelector("span#count").textContent = `${count} runs`;
}

// Sort a table as it was before its rows changed: a click on a column turns its direction.
function sortAgain(table, column, direction) {
  const head = table.tHead.rows[0].cells[column];
  head.setAttribute("aria-sort", direction === "ascending" ? "descending" : "ascending");
  head.click();
}

function updateRuns(fresh) {
  const body = runs.tBodies[0];
  const before = new Map([...body.rows].map((row) => [row.id, row]));
  const focused = document.activeElement;
  const [focusedRow, focusedKind] = [focused?.closest("tr")?.id, focused?.localName];
  let changed = false;
  for (const row of [...fresh.tBodies[0].rows].reverse()) {
    const old = before.get(row.id);
    before.delete(row.id);
    if (old?.innerHTML === row.innerHTML) continue;
    changed = true;
    if (!old) body.prepend(row);
    else {
      row.querySelector("input").checked = old.querySelector("input").checked;
      old.replaceWith(row);
    }
  }
  for (const row of before.values()) row.remove();
  if (!changed && !before.size) return;
  const head = runs.querySelector("th[aria-sort]");
  if (head) sortAgain(runs, head.cellIndex, head.getAttribute("aria-sort"));
  if (focusedRow) document.getElementById(focusedRow)?.querySelector(focusedKind)?.focus({ preventScroll: true });
  filterRuns();
}

// The newest output is at the end, which stays in view as long as nobody scrolls away from it.
const showsEnd = (box) => box.closest("#output") && box.scrollTop + box.clientHeight > box.scrollHeight - 4;
function showEnds(root) {
  for (const box of root.querySelectorAll("#output pre")) box.scrollTop = box.scrollHeight;
}

// Replace a section, with its tables sorted, its folds open and its texts scrolled as they were.
function replaceSection(old, section) {
  const title = (fold) => fold.querySelector("summary").textContent.replace(/\d+/g, "");
  const open = new Set([...old.querySelectorAll("details[open]")].map(title));
  for (const fold of section.querySelectorAll("details")) {
    fold.open = open.has(title(fold));
    if (fold.open) fold.dataset.was = "open"; // its toggle is not the reader's
  }
  const sorted = [...old.querySelectorAll(".scroll table")].map((table) => table.querySelector("th[aria-sort]"));
  const scrolled = [...old.querySelectorAll("pre, .scroll")].map((box) => [showsEnd(box) ? 1e9 : box.scrollTop, box.scrollLeft]);
  old.replaceWith(section);
  prepare(section);
  [...section.querySelectorAll(".scroll table")].forEach((table, place) => {
    const head = sorted[place];
    if (head && table.tHead.rows[0].cells[head.cellIndex]) sortAgain(table, head.cellIndex, head.getAttribute("aria-sort"));
  });
  [...section.querySelectorAll("pre, .scroll")].forEach((box, place) => {
    if (scrolled[place]) [box.scrollTop, box.scrollLeft] = scrolled[place];
  });
}

function updateSections(fresh) {
  const main = document.querySelector("main");
  const sections = [...fresh.querySelectorAll("main > section")];
  const ids = new Set(sections.map((section) => section.id));
  for (const section of [...main.children]) if (!ids.has(section.id)) section.remove();
  sections.forEach((section, place) => {
    const html = section.outerHTML;
    const old = document.querySelector(`main > section#${CSS.escape(section.id)}`);
    if (!old) {
      main.insertBefore(section, main.children[place] ?? null);
      prepare(section);
      showEnds(section);
    } else if (sent.get(section.id) !== html) replaceSection(old, section);
    sent.set(section.id, html);
  });
}

function update(fresh) {
  for (const name of ["header", "nav", "span#period"]) {
    const [old, now] = [document.querySelector(name), fresh.querySelector(name)];
    if (old?.outerHTML !== now?.outerHTML) old.replaceWith(now);
  }
  const table = fresh.querySelector("table#runs");
  if (Boolean(table) !== Boolean(runs)) location.reload();
  else if (runs) updateRuns(table);
  else updateSections(fresh);
}

// Ask for this page again every few seconds, while it is visible, and show what has changed.
let state = "";
async function look() {
  let answers = document.hidden;
  try {
    if (document.hidden) return;
    const answer = await fetch(location.href, { headers: { "If-None-Match": state } }).catch(() => null);
    answers = Boolean(answer?.ok) || answer?.status === 304;
    if (!answer?.ok) return;
    state = answer.headers.get("ETag");
    update(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } finally {
    document.querySelector("b#lost").hidden = answers;
    wait();
  }
}
showEnds(document);
document.addEventListener("toggle", ({ target: fold }) => {
  if (fold.dataset.was) delete fold.dataset.was;
  else showEnds(fold);
}, true);
const wait = () => setTimeout(look, 1000 * document.querySelector("span#period").dataset.seconds);
if (filter) {
  filter.addEventListener("input", filterRuns);
  window.addEventListener("pageshow", filterRuns);
}
wait();
