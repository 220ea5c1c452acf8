// The page as it changes: a stream of its main part, morphed into place, so that scroll, focus and open rows survive.
const DEFAULT = "5";
const KEPT = "fairlane.every";

const main = document.getElementById("main");
const status = document.getElementById("follow");
const choice = document.getElementById("every");
const root = document.documentElement.dataset.root;

function chosen() {
  const possible = [...choice.options].map((option) => option.value);
  const asked = new URLSearchParams(location.search).get("every") ?? localStorage.getItem(KEPT) ?? DEFAULT;
  return possible.includes(asked) ? asked : DEFAULT;
}

/** The page that is followed: path and query below the dashboard, without what only the browser cares about. */
function page() {
  const query = new URLSearchParams(location.search);
  query.delete("every");
  const path = location.pathname.slice(root.length) || "/";
  return query.size ? `${path}?${query}` : path;
}

function say(state, words) {
  status.dataset.state = state;
  status.textContent = words;
}

function connect(every) {
  document.getElementById("stream")?.remove();
  if (every === "0") {
    say("off", "paused");
    return;
  }
  const stream = document.createElement("div");
  stream.id = "stream";
  stream.hidden = true;
  const asked = new URLSearchParams({ page: page(), every, seen: main.dataset.live });
  stream.setAttribute("hx-sse:connect", `${root}/live?${asked}`);
  stream.setAttribute("hx-target", "#main");
  stream.setAttribute("hx-swap", "innerMorph");
  stream.setAttribute("hx-config", '{"sse":{"reconnectDelay":1000,"reconnectMaxDelay":30000}}');
  document.body.append(stream);
  say("waiting", "connecting");
  window.htmx.process(stream);
}

export function follow(refresh) {
  if (!choice) return;
  choice.value = chosen();
  choice.addEventListener("change", () => {
    localStorage.setItem(KEPT, choice.value);
    const address = new URL(location.href);
    address.searchParams.set("every", choice.value);
    history.replaceState(null, "", address);
    connect(choice.value);
  });
  document.body.addEventListener("htmx:sse:after:connection", () => say("live", "live"));
  document.body.addEventListener("htmx:sse:after:message", (event) => {
    const trouble = event.detail.message?.event === "trouble";
    say(trouble ? "waiting" : "live", trouble ? "cannot be read" : "live");
    if (event.detail.message?.id) main.dataset.live = event.detail.message.id;
    refresh();
  });
  document.body.addEventListener("htmx:sse:error", (event) => {
    say("waiting", "connecting");
    if (event.detail.status === 401) location.reload();
  });
  // A first connection that fails is not tried again by itself; later ones are, ever more rarely.
  const again = (event) => {
    if (event.target.id !== "stream") return;
    say("waiting", "connecting");
    if (event.detail.ctx?.response?.status === 401) location.reload();
    else setTimeout(() => event.target.isConnected && connect(choice.value), 5000);
  };
  document.body.addEventListener("htmx:response:error", again);
  document.body.addEventListener("htmx:error", again);
  connect(choice.value);
}
