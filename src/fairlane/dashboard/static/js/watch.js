// Keys that somebody watches: kept in the browser, and in the address, so that they can be shared.
const KEPT = "fairlane.watched";

const read = () => JSON.parse(localStorage.getItem(KEPT) ?? "[]");

export function watchKeys() {
  for (const button of document.querySelectorAll("button[data-watch]")) {
    const isWatched = read().includes(button.dataset.watch);
    button.setAttribute("aria-pressed", String(isWatched));
    button.textContent = isWatched ? "★ watched" : "☆ watch";
    button.onclick ??= () => {
      const kept = read();
      const at = kept.indexOf(button.dataset.watch);
      if (at < 0) kept.push(button.dataset.watch);
      else kept.splice(at, 1);
      localStorage.setItem(KEPT, JSON.stringify(kept));
      watchKeys();
    };
  }
}
