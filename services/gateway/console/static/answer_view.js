/** An answer in the playground: its choices side by side, how fast it was, and which workers served it. */

import { el, newId, replace, setAll, setText } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { logprobLegend, logprobView } from "./logprob_view.js";
import { requestHash } from "./router.js";
import { servedWords } from "./served.js";

/**
 * The view; `show(answer)`, `showServed(record)`. After `setOpen(false)` nothing can be chosen, and no results of tools
 * be sent: the chat has gone on. True allows it again.
 *
 * @param {function(number)} onChosen - gets the number of the choice that the chat goes on with
 * @param {function(Array<{id: string, result: string}>)} onResults - gets the results of tools that the viewer wrote,
 *   after onChosen has got the number of the choice that called the tools
 */
export function answerView(onChosen, onResults) {
  const columns = el("div.choices");
  const served = el("p.served.small.muted");
  const error = el("p.why", { role: "alert", hidden: true });
  const legend = logprobLegend();
  legend.hidden = true;
  const group = newId("goes-on");
  const views = [];
  const element = el(
    "article.turn.assistant",
    { "aria-label": "Answer", "aria-busy": "true" },
    columns,
    legend,
    error,
    served,
  );

  const show = (answer) => {
    while (views.length < answer.choices.length) {
      views.push(choiceView(views.length, group, onChosen, onResults));
      columns.append(views.at(-1).element);
    }
    views.forEach((view, index) => view.show(answer.choices[index], answer.choices.length, answer.endedAt !== null));
    legend.hidden = answer.choices.every((choice) => choice.logprobs.length === 0);
    error.hidden = answer.error === null;
    setText(error, answer.error ?? "");
    setAll(element, { "aria-busy": answer.endedAt === null ? "true" : null });
    replace(served, speedWords(answer));
  };
  const showServed = (record) => {
    const words = servedWords(record);
    if (words) served.append(" · ", words);
  };
  const setOpen = (isOpen) => {
    for (const view of views) view.setOpen(isOpen);
  };
  return { element, show, showServed, setOpen };
}

function speedWords(answer) {
  if (answer.endedAt === null) return answer.firstAt === null ? "waiting for the first token …" : "answering …";
  const usage = answer.usage;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const cachedWords = cached ? `, ${count(cached)} of them cached` : "";
  const parts = [
    answer.stopped && "stopped",
    answer.ttftMs !== null && `first token after ${duration(answer.ttftMs)}`,
    `${duration(answer.endedAt - answer.sentAt)} in all`,
    answer.tokensPerSecond !== null && `${rate(answer.tokensPerSecond)} tokens/s`,
    usage && `${count(usage.prompt_tokens)} prompt tokens${cachedWords}, ${count(usage.completion_tokens)} generated`,
  ];
  const link = answer.requestId && [" · ", el("a", { href: requestHash(answer.requestId) }, "this request")];
  return [parts.filter(Boolean).join(" · "), link].flat().filter(Boolean);
}

function choiceView(index, group, onChosen, onResults) {
  const text = el("div.text");
  const thoughts = el("pre.thoughts");
  const reasoning = el("details", { hidden: true }, el("summary", "Reasoning"), thoughts);
  const tokens = logprobView();
  const calls = el("div.calls");
  const finish = el("span.small.muted");
  const radio = el("input", { type: "radio", name: group, checked: index === 0, change: () => onChosen(index) });
  const chooser = el("label.check.small", { hidden: true }, radio, "go on with this one");
  const element = el(
    "section.choice",
    { "aria-label": `Choice ${index + 1}` },
    reasoning,
    text,
    tokens.element,
    calls,
    el("div.choice-foot", finish, chooser),
  );
  const results = el("fieldset.calls");
  const submit = (found) => {
    radio.checked = true;
    onChosen(index);
    onResults(found);
  };
  let callsShown = false;
  const show = (choice, of, ended) => {
    setText(thoughts, choice.reasoning);
    reasoning.hidden = choice.reasoning === "";
    text.hidden = choice.logprobs.length > 0;
    setText(text, choice.text);
    tokens.show(choice.logprobs);
    if (!ended)
      replace(
        calls,
        choice.calls.map((call) => el("pre.call", `${call.name}(${call.arguments})`)),
      );
    else if (!callsShown && choice.calls.length) {
      callsShown = true;
      replace(results, callForm(choice.calls, submit));
      replace(calls, results);
    }
    setText(finish, choice.finish ? `finish reason: ${choice.finish}` : "");
    chooser.hidden = of < 2 || !ended;
  };
  const setOpen = (isOpen) => {
    for (const control of [radio, results]) setAll(control, { disabled: !isOpen });
  };
  return { element, show, setOpen };
}

/** Calls of tools, and fields for what the tools would have returned. */
function callForm(calls, onResults) {
  const fields = calls.map((call) => {
    const id = newId("result");
    const input = el("textarea.code", { id, rows: 2, required: true });
    return {
      call,
      input,
      element: el(
        "div.field",
        el("pre.call", `${call.name}(${call.arguments})`),
        el("label", { for: id }, `What ${call.name} returns`),
        input,
      ),
    };
  });
  const submit = (event) => {
    event.preventDefault();
    onResults(fields.map(({ call, input }) => ({ id: call.id, result: input.value })));
  };
  return el(
    "form",
    { submit },
    fields.map((field) => field.element),
    el("button", { type: "submit" }, "Send results"),
  );
}
