"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const form = byId("form");
  const results = byId("results");
  const status = byId("status");
  const strip = byId("strip");
  const prompt = byId("prompt");
  const more = byId("more");
  const cards = {
    sparse: { note: byId("sparse-note"), answer: byId("sparse-answer"), why: byId("sparse-why"), figure: byId("figure-sparse") },
    dense: { note: byId("dense-note"), answer: byId("dense-answer"), why: byId("dense-why"), figure: byId("figure-dense") },
  };

  // The reasons and phases of the server in words, as the command line has them.
  const REASONS = {
    engaged: "the speculator chose what to read",
    disabled: "sparse prefill was switched off",
    prompt_logprobs: "log-probabilities of the prompt need every token of it",
    short_prompt: "the prompt is short",
    nothing_to_drop: "the budget covers every chunk",
    forced_cover_budget: "what is always kept fills the budget",
    low_predicted_gain: "the cost model predicts too little gain",
    information_dense: "no part of the prompt could be left out",
    speculator_failed: "the speculator failed",
  };
  const PHASES = {
    tokenise: "tokenise",
    queue: "wait in the queue",
    speculate: "speculate",
    score: "score and choose",
    main_prefill: "main prefill",
    first_token: "first token",
    decode: "decode",
  };
  const ENDS = { stop: "complete", length: "cut at the limit", abort: "ended by the server" };

  const LONGEST_PART = 1024; // tokens of one piece of the prompt's text
  const SCREENFUL = 4096; // tokens that are turned into text when the end of what is shown comes into view
  const AT_ONCE = 6; // parts that are asked for together: as many connections as browsers open
  const FAR = 512; // tokens before a part, after which its text is decoded from nearer by
  const NEAR = 8; // so near: more tokens than any character has

  const count = (number) => number.toLocaleString("en");
  const plural = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;
  const seconds = (value) => {
    if (!Number.isFinite(value)) return "–";
    if (value >= 10) return `${value.toFixed(1)} s`;
    if (value >= 1) return `${value.toFixed(2)} s`;
    return `${(value * 1000).toFixed(value >= 0.01 ? 0 : 1)} ms`;
  };
  const sentence = (words) => `${words.slice(0, 1).toUpperCase()}${words.slice(1)}${/[^.!?]$/.test(words) ? "." : ""}`;
  const percent = (share) => `${(share * 100).toFixed(1)} %`;
  const element = (tag, text = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    return made;
  };

  /** What went wrong, in words for people; `status` is the server's, 0 where it did not answer. */
  class Problem extends Error {
    constructor(message, status = 0) {
      super(message);
      this.status = status;
    }
  }

  const problemOf = async (response) => {
    let said = "";
    try {
      said = (await response.json()).error.message ?? "";
    } catch { /* not the server's own answer: a proxy's, perhaps */ }
    const wait = Number(response.headers.get("Retry-After"));
    const again = wait > 0 ? ` Try again in ${plural(Math.ceil(wait), "second")}.` : "";
    const words = {
      401: "The server wants an API key, or does not know this one.",
      413: `The text is longer than the server takes. ${sentence(said)}`,
      429: `The server is full.${again}`,
      503: `${said ? sentence(said) : "The server is not ready."}${again}`,
    }[response.status];
    return new Problem((words ?? said).trim() || `The server answered with status ${response.status}.`, response.status);
  };

  const call = async (path, body, signal) => {
    const key = byId("key").value.trim();
    if (/[^\x21-\x7e]/.test(key)) throw new Problem("The API key holds a character that no key can have.", 401);
    const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, {
        method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store",
      });
    } catch (error) {
      throw signal?.aborted ? error : new Problem("The server does not answer.");
    }
    if (!response.ok) throw await problemOf(response);
    return response;
  };

  /** The objects of a stream of server-sent events, up to [DONE]. */
  const events = async function* (response, signal) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const read = () => reader.read().catch((error) => {
      throw signal.aborted ? error : new Problem("The connection was lost.");
    });
    let rest = "";
    try {
      for (;;) {
        const { done, value } = await read();
        if (done) throw new Problem("The connection ended before the answer did.");
        const frames = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
        rest = frames.pop();
        for (const frame of frames) {
          const lines = frame.split("\n").filter((line) => line.startsWith("data:"));
          const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
          if (data === "[DONE]") return;
          if (!data) continue; // a comment that keeps the connection open
          const event = JSON.parse(data);
          if (event.error) throw new Problem(`The server failed: ${event.error.message}`);
          yield event;
        }
      }
    } finally {
      reader.cancel().catch(() => {}); // what failed has been said
    }
  };

  // The model

  let model = null;
  let chat = true; // false once the model turned out to have no chat template
  let later = 0;

  const connect = async () => {
    clearTimeout(later);
    const line = byId("model");
    try {
      const card = (await (await call("v1/models")).json()).data[0];
      chat = chat || card.id !== model;
      model = card.id;
      line.replaceChildren("Main model ", element("b", model));
      if (card.max_model_len) line.append(`, up to ${count(card.max_model_len)} tokens of text and answer`);
    } catch (error) {
      model = null;
      line.textContent = error.message;
      if (error.status === 0 || error.status === 503) later = setTimeout(connect, 3000);
      throw error;
    }
  };

  // One run

  /** The prompt as the routes for answers and for tokens take it. */
  const promptOf = () => {
    const parts = [byId("text").value, byId("question").value.trim()];
    const content = parts.filter(Boolean).join("\n\n").toWellFormed();
    return chat ? { messages: [{ role: "user", content }] } : { prompt: content };
  };

  /** Ask once and show the answer as it comes; returns how it was read, the prompt and the time of the first token. */
  const ask = async (name, settings, signal) => {
    const { answer, note, why, figure } = cards[name];
    const body = {
      model, ...promptOf(), max_tokens: Number(byId("max-tokens").value), temperature: 0, stream: true,
      stream_options: { include_usage: true }, specprefill: settings,
    };
    const run = { name, prompt: promptOf(), seen: undefined, reading: null, usage: null, finish: null };
    const start = performance.now();
    const elapsed = () => (performance.now() - start) / 1000;
    const tick = () => { note.textContent = `${run.seen === undefined ? "reading" : "answering"}, ${elapsed().toFixed(1)} s`; };
    const ticking = setInterval(tick, 100);
    answer.setAttribute("aria-busy", "true");
    tick();
    try {
      const response = await call(chat ? "v1/chat/completions" : "v1/completions", body, signal);
      for await (const event of events(response, signal)) {
        const choice = event.choices?.[0];
        const text = choice?.delta?.content ?? choice?.text ?? "";
        if (choice && run.seen === undefined) {
          run.seen = elapsed();
          tick();
        }
        if (text) answer.append(text);
        run.finish = choice?.finish_reason ?? run.finish;
        run.usage = event.usage ?? run.usage;
        run.reading = event.specprefill ?? run.reading;
      }
    } catch (error) {
      note.textContent = signal.aborted ? "stopped" : "failed";
      throw error;
    } finally {
      clearInterval(ticking);
      answer.setAttribute("aria-busy", "false");
    }
    if (!answer.textContent.trim()) answer.textContent = "(nothing)";
    const tokens = run.usage ? `${plural(run.usage.completion_tokens, "token")}, ` : "";
    note.textContent = tokens + (ENDS[run.finish] ?? run.finish ?? "complete");
    why.textContent = howRead(run.reading);
    figure.textContent = seconds(firstToken(run));
    return run;
  };

  const askEitherWay = async (name, settings, signal) => {
    try {
      return await ask(name, settings, signal);
    } catch (error) {
      if (!chat || error.status !== 400 || !/chat.template/i.test(error.message)) throw error;
      chat = false;
      return ask(name, settings, signal);
    }
  };

  const firstToken = (run) => run.reading?.timings?.ttft ?? run.seen;

  const howRead = (reading) => {
    if (!reading) return "The server does not say how it read the prompt.";
    const reason = REASONS[reading.reason] ?? reading.reason;
    const detail = reading.detail ? ` (${reading.detail})` : "";
    const much = reading.engaged
      ? `Read ${count(reading.kept_tokens)} of ${plural(reading.num_tokens, "token")}`
      : `Read whole, ${plural(reading.num_tokens, "token")}`;
    const cached = reading.cached_tokens > 0
      ? ` ${plural(reading.cached_tokens, "token")} came from the cache, so that a first reading takes longer.` : "";
    return `${much}: ${reason}${detail}.${cached}`;
  };

  const showTimes = (runs) => {
    const row = (label, values) => {
      const made = element("tr");
      const head = element("th", label);
      head.scope = "row";
      made.append(head, ...values.map((value) => element("td", seconds(value))));
      return made;
    };
    const timings = runs.map((run) => run?.reading?.timings ?? {});
    const rows = Object.entries(PHASES).map(([phase, label]) => row(label, timings.map((each) => each[phase] || NaN)));
    const sum = row("to the first token", timings.map((each) => each.ttft));
    sum.className = "sum";
    rows.splice(-1, 0, sum, row("the same, as this browser saw it", runs.map((run) => run?.seen)));
    byId("times").replaceChildren(...rows, row("total", timings.map((each) => each.total)));
  };

  // The map

  /** Neighbouring chunks of one kind as runs of tokens. */
  const runsOf = ({ num_tokens, chunk_size, kept_chunks, forced_chunks = "" }) => {
    const kinds = [...kept_chunks].map((kept, chunk) => (kept !== "1" ? "" : forced_chunks[chunk] === "1" ? "f" : "k"));
    const runs = [];
    kinds.forEach((kind, chunk) => {
      const end = Math.min((chunk + 1) * chunk_size, num_tokens);
      if (runs.at(-1)?.kind === kind) runs.at(-1).end = end;
      else runs.push({ kind, start: chunk * chunk_size, end });
    });
    return runs;
  };

  const showMap = (reading) => {
    byId("map").hidden = !reading?.kept_chunks;
    byId("tools").hidden = prompt.hidden = true;
    strip.classList.remove("ready");
    if (!reading?.kept_chunks) return;
    const chunks = reading.kept_chunks.length;
    strip.setAttribute("viewBox", `0 0 ${chunks} 1`);
    strip.replaceChildren(...runsOf(reading).filter(({ kind }) => kind).map(({ kind, start, end }) => {
      const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const from = start / reading.chunk_size;
      const box = { class: kind, x: from, y: 0, width: Math.ceil(end / reading.chunk_size) - from, height: 1 };
      for (const [name, value] of Object.entries(box)) bar.setAttribute(name, value);
      return bar;
    }));
    const kept = reading.kept_chunks.split("1").length - 1;
    const forced = (reading.forced_chunks ?? "").split("1").length - 1;
    const always = forced ? `, ${count(forced)} of them whatever their score` : "";
    const words = reading.engaged
      ? `${count(kept)} of ${plural(chunks, "chunk")} of ${plural(reading.chunk_size, "token")} were kept${always}`
      : `All ${plural(chunks, "chunk")} were read`;
    strip.setAttribute("aria-label", words);
    byId("map-caption").textContent = `${words}. The text runs from left to right.`;
  };

  /** Gives the text of neighbouring parts, all that are wanted at once.
   *
   * A part is decoded together with tokens before it: alone it may lose a space in front, and a character may lie across
   * its border. Such a character, U+FFFD until it is complete, goes to the part that completes it. */
  const decoder = (ids, signal) => {
    const decode = async (start, end) => {
      const response = await call("detokenize", { model, tokens: ids.slice(start, end) }, signal);
      const text = (await response.json()).prompt;
      return end === ids.length ? text : text.replace(/\ufffd+$/, "");
    };
    let from = 0;
    let before = "";
    return async (parts) => {
      const asked = parts.map(({ start, end }) => {
        const far = start - from > FAR;
        if (far) from = start - NEAR;
        return Promise.all([far ? decode(from, start) : null, decode(from, end)]);
      });
      return (await Promise.all(asked)).map(([base, text]) => {
        const part = text.slice((base ?? before).length);
        before = text;
        return part;
      });
    };
  };

  let reader = null; // of the text that is shown: parts, fill, stop

  /** Show the text with what was dropped dimmed, a screenful at a time as it is scrolled to. */
  const showText = async ({ prompt: asked, reading }) => {
    const stop = new AbortController();
    const { signal } = stop;
    const parts = runsOf(reading).flatMap(({ kind, start, end }) => {
      const pieces = Math.ceil((end - start) / LONGEST_PART);
      return Array.from({ length: pieces }, (_, piece) => ({
        kind, start: start + piece * LONGEST_PART, end: Math.min(start + (piece + 1) * LONGEST_PART, end), gap: end - start,
      }));
    });
    const shown = [];
    let filled = Promise.resolve();
    reader = { stop, parts, shown };
    prompt.replaceChildren(more);
    prompt.hidden = false;
    more.hidden = false;
    more.textContent = "Fetching the text";
    prompt.scrollTop = 0;
    try {
      const response = await call("tokenize", { model, ...asked, ...(asked.messages && { add_generation_prompt: true }) }, signal);
      const { tokens } = await response.json();
      if (tokens.length !== reading.num_tokens) {
        throw new Problem(`The text cannot be shown: it is ${count(tokens.length)} tokens by now.`);
      }
      const decode = decoder(tokens, signal);
      const fill = (upTo) => {
        filled = filled.then(async () => {
          while (shown.length < Math.min(upTo, parts.length)) {
            const next = parts.slice(shown.length, Math.min(shown.length + AT_ONCE, upTo));
            const texts = await decode(next);
            const made = next.map(({ kind, gap }, index) => {
              const part = element(kind ? "mark" : "span", texts[index]);
              if (kind === "f") part.className = "f";
              if (!kind) part.dataset.gap = count(gap);
              return part;
            });
            more.before(...made);
            shown.push(...made);
          }
          more.hidden = shown.length === parts.length;
        });
        return filled;
      };
      reader.fill = fill;
      const nextFill = () => {
        const until = (parts[shown.length]?.start ?? 0) + SCREENFUL;
        const end = parts.findIndex((part) => part.start >= until);
        return fill(end < 0 ? parts.length : end);
      };
      await nextFill();
      byId("tools").hidden = false;
      strip.classList.add("ready");
      const watch = new IntersectionObserver(async (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        watch.unobserve(more);
        await nextFill().then(() => watch.observe(more), textFailed); // again, since it may be in view still
      });
      signal.addEventListener("abort", () => watch.disconnect());
      watch.observe(more);
    } catch (error) {
      textFailed(error);
    }
    function textFailed(error) {
      if (signal.aborted) return;
      more.hidden = false;
      more.textContent = error instanceof Problem ? error.message : "The text cannot be shown.";
    }
  };

  strip.addEventListener("click", async (event) => {
    if (!strip.classList.contains("ready")) return;
    const { parts, shown, fill, stop } = reader;
    const box = strip.getBoundingClientRect();
    const token = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 0.9999) * strip.viewBox.baseVal.width;
    const chunkSize = parts.at(-1).end / strip.viewBox.baseVal.width;
    const index = parts.findIndex((part) => part.end > token * chunkSize);
    try {
      await fill(index + 1);
    } catch { return; /* the text says so itself */ }
    if (stop.signal.aborted) return;
    prompt.querySelector(".here")?.classList.remove("here");
    shown[index].classList.add("here");
    shown[index].scrollIntoView({ block: "nearest" });
  });

  byId("only").addEventListener("click", (event) => {
    event.currentTarget.setAttribute("aria-pressed", String(prompt.classList.toggle("only")));
  });

  // Both runs

  let running = null;

  const clear = () => {
    reader?.stop.abort();
    byId("error").textContent = "";
    byId("figure-read").textContent = byId("figure-speedup").textContent = "–";
    for (const { note, answer, why, figure } of Object.values(cards)) {
      note.textContent = answer.textContent = why.textContent = "";
      figure.textContent = "–";
    }
    showTimes([null, null]);
    showMap(null);
  };

  const finish = (sparse, dense) => {
    showTimes([sparse, dense]);
    if (sparse.reading && !sparse.reading.engaged) {
      return `Done. The prompt was read whole both times: ${REASONS[sparse.reading.reason] ?? sparse.reading.reason}.`;
    }
    const speedup = firstToken(dense) / firstToken(sparse);
    if (!Number.isFinite(speedup)) return "Done.";
    byId("figure-speedup").textContent = `${speedup.toFixed(2)}x`;
    const warm = dense.reading?.cached_tokens > 0 ? " Part of the dense reading came from the cache." : "";
    return `Done. Read sparsely, the first token came ${speedup.toFixed(2)} times as fast.${warm}`;
  };

  const runBoth = async () => {
    if (running) return;
    running = new AbortController();
    const { signal } = running;
    byId("run").setAttribute("aria-disabled", "true");
    byId("stop").hidden = false;
    clear();
    results.hidden = false;
    const rate = Number((Number(byId("rate").value) / 100).toFixed(6));
    let sparse = null;
    try {
      status.textContent = "Asking for the model";
      if (!model) await connect();
      signal.throwIfAborted();
      status.textContent = "Reading sparsely";
      cards.dense.note.textContent = "comes next";
      if (cards.sparse.why.getBoundingClientRect().bottom > innerHeight) byId("state").scrollIntoView();
      sparse = await askEitherWay("sparse", { enabled: true, keep_rate: rate, map: true }, signal);
      const { reading } = sparse;
      if (reading) byId("figure-read").textContent = percent(reading.kept_tokens / reading.num_tokens);
      showTimes([sparse, null]);
      showMap(reading);
      status.textContent = "Sparse answer complete. Reading whole";
      status.textContent = finish(sparse, await askEitherWay("dense", { enabled: false }, signal));
    } catch (error) {
      if (!sparse) cards.dense.note.textContent = "";
      status.textContent = signal.aborted ? "Stopped." : "";
      if (!signal.aborted) byId("error").textContent = error instanceof Problem ? error.message : `The page failed: ${error.message}`;
    } finally {
      running = null;
      byId("run").removeAttribute("aria-disabled");
      if (document.activeElement === byId("stop")) byId("run").focus({ preventScroll: true });
      byId("stop").hidden = true;
    }
    // Only now, so that it takes no time from the dense run.
    if (sparse?.reading?.kept_chunks && sparse.reading.engaged) await showText(sparse);
  };

  // The form

  const showSize = () => {
    const { length } = byId("text").value;
    byId("size").textContent = length ? plural(length, "character") : "";
  };

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    runBoth();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    if (!running) form.requestSubmit();
  });
  byId("text").addEventListener("input", showSize);
  byId("rate-slider").addEventListener("input", () => { byId("rate").value = byId("rate-slider").value; });
  byId("rate").addEventListener("input", () => { byId("rate-slider").value = byId("rate").value; });
  byId("example").addEventListener("click", () => {
    const paragraphs = [...byId("example-text").content.children];
    byId("text").value = paragraphs.map((each) => each.textContent.replace(/\s+/g, " ")).join("\n\n");
    byId("question").value = "What is the number of the tool locker?";
    showSize();
  });

  // This tab's own memory, gone when it is closed.
  byId("key").value = sessionStorage.getItem("specprefill-key") ?? "";
  byId("key").addEventListener("change", () => {
    sessionStorage.setItem("specprefill-key", byId("key").value.trim());
    connect().catch(() => {}); // the line on the model says what is wrong
  });
  byId("rate-slider").value = byId("rate").value; // a browser that reloads may have kept only one of them
  showSize();
  connect().catch(() => {});
})();
