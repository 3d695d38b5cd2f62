// The server, as the page sees it. A session lives in the server; its key lives in the tab.
const KEY = "torchemo-session";
let session = null;

export class Refused extends Error {}
export class Lost extends Error {}

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(`api/${path}`, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Lost("The program does not answer. Is it still running?");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) {
    const refused = new Refused(body.error || `The program answered ${response.status}.`);
    refused.status = response.status;
    throw refused;
  }
  return body;
}

export async function begin() {
  const run = await ask("run");
  session = sessionStorage.getItem(KEY);
  if (session !== null) {
    try {
      return { run, state: await state(), fresh: false };
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }
  await renew();
  return { run, state: await act("add_class").then(() => act("add_class")), fresh: true };
}

export async function renew() {
  session = (await ask("sessions", { method: "POST" })).session;
  sessionStorage.setItem(KEY, session);
}

export const address = (path) => `api/sessions/${session}/${path}`;

export const state = () => ask(`sessions/${session}`);

export const act = (action, more = {}) =>
  ask(`sessions/${session}/do`, { method: "POST", body: JSON.stringify({ action, ...more }) });

export const remember = () => ask(`sessions/${session}/remember`, { method: "POST" });

export const visits = () => ask("visits");

export const changeVisits = (action, more) =>
  ask("visits/do", { method: "POST", body: JSON.stringify({ action, ...more }) });

export function addImage(file, box, signal) {
  const where = new URLSearchParams({ name: file.name });
  if (box !== null) where.set("box", box);
  return ask(`sessions/${session}/images?${where}`, { method: "POST", body: file, signal });
}

export const openSaved = (file) => ask(`sessions/${session}/open`, { method: "POST", body: file });
