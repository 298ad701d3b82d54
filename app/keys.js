// Keys of the dashboard, and roles that the sidebar's list lacks. It reads nothing of a run.
//   /    the page's search, else that of the page Runs; Escape leaves it
//   g h  Home;  g d  Diagnosis;  g r  Runs;  g l  Learn
//   left, right  one step back or on, where the page has a slider of steps
(() => {
  if (window.ampscopeKeys) return; // a page that is drawn anew brings the script again
  window.ampscopeKeys = true;

  const PAGES = { h: "home", d: "diagnosis", r: "runs", l: "learn" };
  const GO_WITHIN_MS = 5000; // a busy page hears the second key late
  const WAIT_MS = 5000;
  let goAt = -Infinity;

  const takesText = (element) =>
    element.isContentEditable ||
    element.matches("textarea, select, input:not([type=range], [type=checkbox], [type=radio])");

  const search = () => document.querySelector('[data-testid=stMain] input[aria-label="Find"]');

  const open = (name) => {
    const links = [...document.querySelectorAll("a[data-testid=stSidebarNavLink]")];
    const isIt = (path) => path.endsWith(`/${name}`) || (name === "home" && path.endsWith("/"));
    links.find((link) => isIt(new URL(link.href).pathname))?.click();
  };

  const focusSearch = () => {
    if (search()) return search().focus();
    open("runs");
    const until = performance.now() + WAIT_MS;
    const timer = setInterval(() => {
      if (search() || performance.now() > until) {
        clearInterval(timer);
        search()?.focus();
      }
    }, 50);
  };

  const move = (key) => {
    const slider = document.querySelector('[data-testid=stMain] input[type=range][aria-label="Step"]');
    slider?.focus();
    const event = { key, code: key, bubbles: true, cancelable: true };
    slider?.dispatchEvent(new KeyboardEvent("keydown", event));
    slider?.dispatchEvent(new KeyboardEvent("keyup", event));
    return Boolean(slider);
  };

  document.addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (takesText(target)) {
      if (key === "Escape" && target === search()) target.blur();
      return;
    }
    const goes = event.timeStamp - goAt < GO_WITHIN_MS;
    goAt = key === "g" ? event.timeStamp : -Infinity;
    if (goes && PAGES[key]) {
      open(PAGES[key]);
    } else if (key === "/") {
      focusSearch();
    } else if (["ArrowLeft", "ArrowRight"].includes(key) && target === document.body) {
      if (!move(key)) return;
    } else {
      return;
    }
    event.preventDefault();
  });

  // Code that is wider than its frame is moved by keys once it has the focus.
  // Streamlit puts an element for each section between the list and its items, as no list may have.
  const fix = () => {
    for (const list of document.querySelectorAll("[data-testid=stSidebarNavItems]:not([role])")) {
      list.setAttribute("role", "none");
    }
    for (const item of document.querySelectorAll("[data-testid=stSidebarNavItems] li:not([role])")) {
      item.setAttribute("role", "none");
    }
    for (const code of document.querySelectorAll("[data-testid=stCode] pre:not([tabindex])")) {
      code.setAttribute("tabindex", "0");
    }
  };
  fix();
  new MutationObserver(fix).observe(document.body, { childList: true, subtree: true });
})();
