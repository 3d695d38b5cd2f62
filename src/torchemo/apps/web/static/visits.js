// The store of past visits: keep the board, and list, rename or forget what is known.
import * as server from "./server.js";
import { byId, count, element, often } from "./element.js";

let shown = false;

export function beginVisits(about, page) {
  shown = Boolean(about.remember);
  byId("visits").hidden = !shown;
  if (!shown) return;
  byId("remember").addEventListener("click", () => {
    byId("remember").disabled = true;
    page.run(server.remember).then(() => list(page));
  });
  list(page);
}

export function showVisits(state, busy) {
  if (!shown) return;
  const taught = state.boxes.filter((box) => box.images.length).length;
  byId("remember").disabled = busy || taught < 2 || state.kept;
  const words = state.kept ? "This visit is in the store." : taught < 2 ? "Give images to at least two classes." : "This visit is not in the store.";
  if (byId("remember-status").textContent !== words) byId("remember-status").textContent = words;
}

async function list(page) {
  try {
    fill(await server.visits(), page);
  } catch (error) {
    page.say(error.message);
  }
}

function fill(store, page) {
  byId("visits-words").textContent = `${store.name}: ${count(store.visits, "visit")}, ${Math.ceil(store.bytes / 1000)} kB`;
  byId("known").replaceChildren(...store.classes.map((one) => line(one, page)));
}

function line(one, page) {
  const name = element("input", { type: "text", maxlength: 255, value: one.name, "aria-label": `Name of the known class ${one.name}`, spellcheck: "false" });
  const forget = element("button", { type: "button", class: "small", "aria-label": `Forget ${one.name}` }, "Forget");
  name.addEventListener("change", () => change("rename", { class: one.name, name: name.value }, page));
  forget.addEventListener("click", () => {
    const words = `Forget all ${count(one.visits, "visit")} in which ${one.name} had a part? They cannot be taken back.`;
    if (window.confirm(words)) change("forget", { class: one.name }, page);
  });
  const facts = `seen ${often(one.visits)}, ${count(one.images, "image")}, last on ${one.last.slice(0, 10)}`;
  return element("li", {}, name, element("span", { class: "label" }, facts), forget);
}

async function change(action, more, page) {
  let found = null;
  await page.run(async () => {
    found = await server.changeVisits(action, more);
    return server.state();
  });
  if (found) fill(found, page);
  else list(page);
}
