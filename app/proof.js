(() => {
  const base = new URL(document.currentScript.src).pathname.replace(/ampscope\.js$/, "");
  const key = "ampscope:" + base;
  // Where the server is. Streamlit tries /PAGE/_stcore/ first otherwise, and is answered 404.
  window.__streamlit = {...window.__streamlit, BACKEND_BASE_URL: location.origin + base};
  let proof = "";
  try {
    const given = /^#ampscope=([0-9a-f]{64})$/.exec(location.hash);
    if (given) {
      localStorage.setItem(key, given[1]);
      history.replaceState(null, "", location.pathname + location.search);
    }
    proof = localStorage.getItem(key) || "";
  } catch (error) { /* a browser without storage has no proof */ }
  const Plain = window.WebSocket;
  if (proof) {
    window.WebSocket = class extends Plain {
      constructor(url, protocols) {
        const asked = [].concat(protocols === undefined ? [] : protocols);
        const own = new URL(url, location.href).host === location.host;
        super(url, own ? [...asked, "ampscope." + proof] : asked);
      }
    };
  }
  fetch(base + "ampscope/open", {headers: {"X-Ampscope-Proof": proof}, cache: "no-store"})
    .then((answer) => { if (answer.status === 401) location.replace(base + "ampscope/locked"); })
    .catch(() => {});
})();
