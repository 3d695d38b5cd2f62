// Elements are made by hand: a name from the user only ever becomes text, never markup.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// Long names of files and classes break where their words end, not within a word.
export const breakable = (name) => name.split(/(?<=[_.-])/).flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));

export const byId = (id) => document.getElementById(id);

export const percent = (share) => `${Math.round(100 * share)} %`;

export const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`;

// Whatever takes files takes them in two ways: by dropping, and from the list of files.
export function takesFiles(zone, input, button, take) {
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    take([...input.files]);
    input.value = "";
  });
  let depth = 0;
  const mark = (change) => {
    depth = Math.max(0, depth + change);
    zone.classList.toggle("over", depth > 0);
  };
  zone.addEventListener("dragenter", () => mark(1));
  zone.addEventListener("dragleave", () => mark(-1));
  zone.addEventListener("dragover", (event) => event.preventDefault());
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(-depth);
    take([...event.dataTransfer.files]);
  });
}

export const often = (times) => (times === 1 ? "once" : `${times} times`);
