// Queries and their answers: shares, the images that decided, with and without memory.
import { act, address } from "./server.js";
import { breakable, byId, element, percent } from "./element.js";

const MOST_BARS = 5;

export function showQueries(state, page) {
  const list = byId("queries");
  const known = new Map([...list.children].map((item) => [item.dataset.key, item]));
  const items = state.queries.map((query) => {
    const version = query.answer ? `${state.task.version}` : "";
    const old = known.get(query.key);
    if (old && old.dataset.version === version) return old;
    return makeCard(query, state.task, version, page);
  });
  const same = items.length === list.children.length && items.every((item, i) => list.children[i] === item);
  if (!same) list.replaceChildren(...items);
}

function makeCard(query, task, version, page) {
  const names = task ? task.classes : [];
  // Where memory was skipped there is nothing to compare: both would be the same.
  const compares = task && (task.recalled.length > 0 || (task.seen && task.seen.visits > 0));
  const remove = element("button", { type: "button", class: "remove", "aria-label": `Remove ${query.name}` }, "×");
  remove.addEventListener("click", () => page.run(() => act("remove_image", { key: query.key })).then(() => byId("choose-queries").focus()));
  const words = element("div", {}, element("p", { class: "file" }, ...breakable(query.name)));
  const card = element("li", { class: "card", "data-key": query.key, "data-version": version },
    element("img", { src: address(`images/${query.key}`), alt: query.name }), words, remove);
  if (!query.answer) {
    words.append(element("p", { class: "soft" }, "not answered yet"));
    return card;
  }
  const { probabilities, without, nearest } = query.answer;
  const best = largest(probabilities);
  words.append(element("p", { class: "answer" }, ...breakable(names[best])), element("p", { class: "label" }, `${percent(probabilities[best])} sure`));
  card.append(bars(probabilities, names));
  if (without && compares) card.append(sides(probabilities, without, names, task.sides));
  card.append(near(nearest, names));
  return card;
}

const largest = (row) => row.indexOf(Math.max(...row));

function bars(row, names) {
  const order = row.map((_, i) => i).sort((a, b) => row[b] - row[a]).slice(0, MOST_BARS);
  const list = element("dl", { class: "bars wide" });
  for (const i of order) {
    const bar = element("i");
    bar.style.width = `${100 * row[i]}%`;
    list.append(element("dt", { title: names[i] }, names[i]),
      element("dd", { class: "bar", "aria-hidden": "true" }, bar), element("dd", { class: "share" }, percent(row[i])));
  }
  return list;
}

function sides(row, without, names, titles) {
  const one = (title, shares, differs) => element("div", { class: differs ? "differs" : "" },
    element("span", { class: "label" }, title), element("br"), ...breakable(names[largest(shares)]), ` ${percent(Math.max(...shares))}`);
  const differs = largest(row) !== largest(without);
  return element("div", { class: "sides wide" }, one(titles[0], row, differs), one(titles[1], without, differs));
}

function near(nearest, names) {
  const list = element("ul", { class: "near" }, ...nearest.map((one) => element("li", { title: names[one.class] },
    element("img", { src: address(`images/${one.image}`), alt: `Support image of ${names[one.class]}, similarity ${one.similarity.toFixed(2)}` }),
    names[one.class], element("br"), one.similarity.toFixed(2))));
  return element("details", { class: "wide" }, element("summary", {}, "support images that decided"), list);
}

export function showMemory(state) {
  const { task } = state;
  byId("memory").hidden = !task;
  if (!task) return;
  byId("memory-words").textContent = task.memory;
  byId("seen").hidden = !task.seen;
  byId("seen").textContent = task.seen ? task.seen.words : "";
  byId("slots").replaceChildren(...task.recalled.map(slot));
}

function slot(one) {
  const facts = [`distance ${one.distance.toFixed(3)}`, `weight ${percent(one.weight)}`];
  if (one.domain) facts.push(`from ${one.domain}`);
  const images = Array.from({ length: one.images }, (_, i) =>
    element("img", { src: `api/slots/${one.slot}/${i}`, alt: `Image ${i + 1} of a training task behind slot ${one.slot}` }));
  return element("li", {}, element("b", {}, `Slot ${one.slot}`), element("br"), facts.join(", "), element("div", {}, ...images));
}
