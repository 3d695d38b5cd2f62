// The boxes of the classes. A box is kept while it is on the page, so that the focus stays where it was.
import { act, addImage, address } from "./server.js";
import { byId, count, element, takesFiles } from "./element.js";

const shown = new Map();

export function showBoxes(state, page) {
  const list = byId("boxes");
  const keys = new Set(state.boxes.map((box) => box.key));
  for (const [key, box] of shown) {
    if (!keys.has(key)) {
      box.item.remove();
      shown.delete(key);
    }
  }
  for (const box of state.boxes) {
    if (!shown.has(box.key)) shown.set(box.key, makeBox(box, page));
    const made = shown.get(box.key);
    if (list.children[state.boxes.indexOf(box)] !== made.item) list.append(made.item);
    fill(made, box, page);
  }
}

export const focusBox = (key) => shown.get(key)?.name.select();

function makeBox(box, page) {
  const name = element("input", { type: "text", maxlength: 80, "aria-label": "Name of the class", spellcheck: "false" });
  const input = element("input", { type: "file", accept: "image/*", multiple: true, hidden: true });
  const choose = element("button", { type: "button", class: "small" }, "Choose files");
  const remove = element("button", { type: "button", class: "small" }, "×");
  const images = element("ul", { class: "images" });
  const note = element("span", { class: "label" });
  const item = element("li", { class: "box", role: "group" },
    element("div", { class: "box-head" }, name, remove), images, element("div", { class: "row" }, choose, note), input);
  name.addEventListener("change", () => page.run(() => act("rename", { key: box.key, name: name.value })));
  name.addEventListener("keydown", (event) => { if (event.key === "Enter") choose.focus(); });
  remove.addEventListener("click", () => page.run(() => act("remove_class", { key: box.key })).then(() => byId("add-class").focus()));
  takesFiles(item, input, choose, (files) => page.upload(files, (file, signal) => addImage(file, box.key, signal)));
  return { item, name, images, note, choose, remove };
}

function fill(made, box, page) {
  if (document.activeElement !== made.name || made.known !== box.name) made.name.value = box.name;
  made.known = box.name;
  made.item.setAttribute("aria-label", `Class ${box.name}, ${count(box.images.length, "image")}`);
  made.choose.setAttribute("aria-label", `Choose images for ${box.name}`);
  made.remove.setAttribute("aria-label", `Remove the class ${box.name}`);
  made.note.textContent = box.images.length ? count(box.images.length, "image") : "or drop images here";
  const keys = new Set(box.images.map((image) => image.key));
  for (const item of [...made.images.children]) if (!keys.has(item.dataset.key)) item.remove();
  const there = new Set([...made.images.children].map((item) => item.dataset.key));
  for (const image of box.images) {
    if (!there.has(image.key)) made.images.append(makeImage(image, made, page));
  }
}

function makeImage(image, made, page) {
  const remove = element("button", { type: "button", class: "remove", "aria-label": `Remove ${image.name}` }, "×");
  remove.addEventListener("click", () => page.run(() => act("remove_image", { key: image.key })).then(() => made.choose.focus()));
  return element("li", { "data-key": image.key },
    element("img", { src: address(`images/${image.key}`), alt: image.name, title: image.name }), remove);
}
