// The page: what happens when something is pressed, and what is shown afterwards.
import * as server from "./server.js";
import { byId, count, takesFiles } from "./element.js";
import { focusBox, showBoxes } from "./boxes.js";
import { showMemory, showQueries } from "./answers.js";
import { beginVisits, showVisits } from "./visits.js";

const POLL = 300;
let state = null;
let uploading = null;
let polling = null;

const page = { run, upload, say };

function show(next) {
  // Replies may overtake each other: a late one must not hide what came after it.
  if (state !== null && next.number < state.number) return;
  state = next;
  showBoxes(state, page);
  showQueries(state, page);
  showMemory(state);
  const running = Boolean(state.job && state.job.running);
  const busy = running || uploading !== null;
  const answered = state.queries.filter((query) => query.answer).length;
  const taught = state.boxes.filter((box) => box.images.length).length;
  showVisits(state, busy);
  byId("answer").disabled = busy || taught < 2 || answered === state.queries.length;
  byId("undo").disabled = busy || state.steps_back === 0;
  byId("clear").disabled = busy || (!state.boxes.length && !state.queries.length);
  byId("clear-queries").disabled = busy || !state.queries.length;
  byId("cancel").hidden = !busy;
  for (const id of ["csv", "json"]) enableLink(id, answered > 0);
  enableLink("save", taught > 0);
  if (uploading === null) showJob(running, answered, taught);
  if (running && polling === null) polling = setTimeout(poll, POLL);
}

function enableLink(id, enabled) {
  const link = byId(id);
  link.setAttribute("aria-disabled", String(!enabled));
  if (enabled) link.href = server.address(id === "save" ? "save" : `answers.${id}`);
  else link.removeAttribute("href");
}

function showJob(running, answered, taught) {
  byId("progress-row").hidden = !running;
  if (running) progress(`Answering: ${state.job.done} of ${state.job.total}`, state.job.done, state.job.total);
  else if (state.job && state.job.error) say(state.job.error);
  const total = state.queries.length;
  let words = "";
  if (taught < 2) words = "Give images to at least two classes.";
  else if (total) words = `${answered} of ${count(total, "image")} answered.`;
  if (!running) setStatus(words);
}

// Set only when it changes: a screen reader reads every change aloud.
function setStatus(words) {
  if (byId("status").textContent !== words) byId("status").textContent = words;
}

function progress(words, done, total) {
  byId("progress-row").hidden = false;
  byId("progress-label").textContent = words;
  byId("progress").max = Math.max(1, total);
  byId("progress").value = done;
}

function say(words) {
  byId("message").textContent = words;
  byId("message").hidden = words === "";
}

async function run(job) {
  say("");
  try {
    show(await job());
  } catch (error) {
    await trouble(error);
  }
}

async function trouble(error) {
  if (error.name === "AbortError") return;
  say(error.message);
  if (error.status === 404) {
    await server.renew();
    if (state !== null) state.number = 0; // a new session counts from 1
    say("The program no longer has this session: it was restarted, or several tabs were opened since. This is a new one.");
  }
  if (error instanceof server.Lost) return;
  show(await server.state());
}

async function poll() {
  polling = null;
  try {
    show(await server.state());
    if (byId("message").dataset.lost) {
      delete byId("message").dataset.lost;
      say("");
    }
  } catch (error) {
    if (error instanceof server.Lost) {
      say(error.message);
      byId("message").dataset.lost = "yes";
      polling = setTimeout(poll, 4 * POLL);
    } else await trouble(error);
  }
}

async function upload(files, send) {
  if (uploading !== null || !files.length) return;
  say("");
  uploading = new AbortController();
  const failed = [];
  let done = 0;
  show(state);
  for (const file of files) {
    progress(`Reading images: ${done} of ${files.length}`, done, files.length);
    try {
      show(await send(file, uploading.signal));
    } catch (error) {
      if (error.name === "AbortError") break;
      if (error instanceof server.Refused && error.status !== 404) failed.push(error.message);
      else {
        failed.push(error.message);
        break;
      }
    }
    done += 1;
  }
  uploading = null;
  const again = () => server.state();
  await run(again);
  if (failed.length) {
    const rest = failed.length > 5 ? [`and ${failed.length - 5} more`] : [];
    say([`${count(failed.length, "image")} could not be used:`, ...failed.slice(0, 5), ...rest].join("\n"));
  }
}

async function begin() {
  try {
    const found = await server.begin();
    const { run: about } = found;
    document.title = `${about.name} - torchemo`;
    byId("about").textContent = `${about.name}: ${about.method}, meta-trained for ${about.steps.toLocaleString("en")} steps on `
      + `${about.classes}-class tasks from ${about.data.join(", ")}. Images are seen at ${about.size.join(" x ")} pixels.`;
    beginVisits(about, page);
    show(found.state);
  } catch (error) {
    say(error.message);
  }
}

byId("add-class").addEventListener("click", () =>
  run(() => server.act("add_class")).then(() => focusBox(state.boxes.at(-1)?.key)));
byId("undo").addEventListener("click", () => run(() => server.act("undo")));
byId("clear").addEventListener("click", () => run(() => server.act("clear")));
byId("clear-queries").addEventListener("click", () => run(() => server.act("clear_queries")));
byId("answer").addEventListener("click", () => run(() => server.act("answer")));
byId("cancel").addEventListener("click", () => {
  if (uploading !== null) uploading.abort();
  else run(() => server.act("cancel"));
});
byId("open").addEventListener("click", () => byId("open-file").click());
byId("open-file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) run(() => server.openSaved(file));
});
takesFiles(byId("query-drop"), byId("query-files"), byId("choose-queries"), (files) =>
  upload(files, (file, signal) => server.addImage(file, null, signal)));
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement;
  if ((event.ctrlKey || event.metaKey) && event.key === "z" && !typing && !byId("undo").disabled) {
    event.preventDefault();
    run(() => server.act("undo"));
  }
});
// A file that misses its box must not replace the page.
for (const kind of ["dragover", "drop"]) window.addEventListener(kind, (event) => event.preventDefault());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && state !== null && uploading === null) poll();
});
begin();
