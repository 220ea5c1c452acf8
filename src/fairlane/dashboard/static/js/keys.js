// Everything can be reached without a mouse: `g` and a letter, `/`, `j` and `k`, `?`.
const shortcuts = document.getElementById("shortcuts");
let goes = 0;

const isTyping = (target) => target.closest?.("input, textarea, select, [contenteditable]") !== null;

function step(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.contains(document.activeElement));
  const row = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + by, 0), rows.length - 1)];
  (row.querySelector("a, summary") ?? row).focus();
}

function act(key) {
  if (goes) {
    clearTimeout(goes);  // else it would end the next `g`
    goes = 0;
    document.querySelector(`[data-go="${CSS.escape(key)}"]`)?.click();
    return true;
  }
  switch (key) {
    case "g":
      goes = setTimeout(() => (goes = 0), 1500);
      return true;
    case "/":
      document.querySelector("[data-search]")?.focus();
      return true;
    case "j":
      step(1);
      return true;
    case "k":
      step(-1);
      return true;
    case "?":
      shortcuts.showModal();
      return true;
  }
  return false;
}

export function listenToKeys() {
  document.getElementById("help").addEventListener("click", () => shortcuts.showModal());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || shortcuts.open) return;
    if (act(event.key)) event.preventDefault();
  });
}
