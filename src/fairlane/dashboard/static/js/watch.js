// Keys that somebody watches: kept in the browser, and in the address, so that they can be shared.
const KEPT = "fairlane.watched";
const MOST = 20; // as many as the overview shows

const read = () => JSON.parse(localStorage.getItem(KEPT) ?? "[]");

/** On the overview: what is watched stands in the address, so that it is shown and can be shared. */
export function bringWatched() {
  const root = document.documentElement.dataset.root;
  const address = new URL(location.href);
  if (address.pathname !== `${root}/` || address.searchParams.has("watch") || !read().length) return;
  for (const each of read()) address.searchParams.append("watch", each);
  location.replace(address);
}

export function watchKeys() {
  for (const button of document.querySelectorAll("button[data-watch]")) {
    const isWatched = read().includes(button.dataset.watch);
    const isFull = !isWatched && read().length >= MOST;
    button.setAttribute("aria-pressed", String(isWatched));
    button.disabled = isFull;
    button.title = isFull ? `${MOST} keys are watched already` : "";
    const word = isWatched ? " watched" : " watch";
    button.textContent = (isWatched ? "★" : "☆") + (button.closest("td") ? "" : word); // a row has room for a star
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
