// The address that is printed at start carries the token behind the #, which no server and no log ever sees.
const found = new URLSearchParams(location.hash.slice(1)).get("token");
if (found) {
  document.querySelector("input[name=token]").value = found;
  history.replaceState(null, "", location.pathname + location.search);
}
