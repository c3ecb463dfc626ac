"use strict";
const report = JSON.parse(document.getElementById("report-data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function draw(chart) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
  const own = chart.layout;
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--text"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 48, r: 12, t: 48, b: 40 },
    legend: { orientation: "h", y: 1, yanchor: "bottom" },
    ...own,
    xaxis: { ...axis, ...own.xaxis },
    yaxis: { ...axis, ...own.yaxis },
  };
  for (const shape of layout.shapes || []) shape.line = { color: colour("--soft"), dash: "dash", width: 1 };
  Plotly.react(`plot-${chart.name}`, chart.traces, layout, { displayModeBar: false, responsive: true });
}

function drawAll() {
  for (const chart of report.charts) draw(chart);
}

// the replay: each lane shows what its method had written at a time
function span(text, kind, depth) {
  const element = document.createElement("span");
  element.textContent = text;
  element.className = kind;
  if (kind === "draft") element.style.background = `hsl(${(200 + 47 * depth) % 360} 70% 75%)`;
  return element;
}

function showLane(lane, seconds) {
  const words = lane.element.querySelector(".words");
  words.replaceChildren();
  let last = null;
  for (const round of lane.rounds) {
    if (round.seconds > seconds) break;
    round.accepted.forEach((text, depth) => words.append(span(text, "draft", depth)));
    words.append(span(round.own, "own"));
    last = round;
  }
  if (last) for (const text of last.rejected) words.append(span(text, "rejected"));
  const done = lane.rounds.filter((round) => round.seconds <= seconds);
  const tokens = done.reduce((sum, round) => sum + (round.tokens ?? round.accepted.length + 1), 0);
  lane.element.querySelector(".count").textContent = `${tokens} tokens, ${done.length} forward passes`;
}

function startReplay() {
  const place = document.getElementById("replay");
  if (!place || !report.replays.length) return;
  const slider = document.getElementById("round");
  const clock = document.getElementById("clock");
  const choice = document.getElementById("replay-choice");
  let lanes = [];
  let playing = null;

  function times() {
    return lanes[lanes.length - 1].rounds.map((round) => round.seconds);
  }
  function show(seconds) {
    for (const lane of lanes) showLane(lane, seconds);
    clock.textContent = `${seconds.toFixed(2)} s`;
  }
  function stop() {
    cancelAnimationFrame(playing);
    playing = null;
    document.getElementById("play").textContent = "Play";
  }
  function choose(number) {
    stop();
    const replay = report.replays[number];
    document.getElementById("replay-prompt").textContent = replay.prompt;
    place.replaceChildren();
    lanes = replay.lanes.map((lane) => {
      const element = document.createElement("div");
      element.className = "lane";
      const title = document.createElement("h3");
      title.textContent = lane.method;
      const words = document.createElement("div");
      words.className = "words";
      const count = document.createElement("p");
      count.className = "soft count";
      element.append(title, words, count);
      place.append(element);
      return { ...lane, element };
    });
    slider.max = times().length - 1;
    slider.value = slider.max;
    show(Math.max(...lanes.flatMap((lane) => lane.rounds.map((round) => round.seconds))));
  }
  slider.addEventListener("input", () => {
    stop();
    show(times()[slider.value]);
  });
  document.getElementById("play").addEventListener("click", () => {
    if (playing !== null) return stop();
    const begun = performance.now();
    const end = Math.max(...lanes.flatMap((lane) => lane.rounds.map((round) => round.seconds)));
    document.getElementById("play").textContent = "Stop";
    const step = () => {
      const seconds = (performance.now() - begun) / 1000;
      show(Math.min(seconds, end));
      slider.value = times().filter((time) => time <= seconds).length - 1;
      if (seconds < end) playing = requestAnimationFrame(step);
      else stop();
    };
    playing = requestAnimationFrame(step);
  });
  report.replays.forEach((replay, number) => {
    const option = document.createElement("option");
    option.value = number;
    option.textContent = replay.title;
    choice.append(option);
  });
  choice.addEventListener("change", () => choose(Number(choice.value)));
  choose(0);
}

drawAll();
startReplay();
dark.addEventListener("change", drawAll);
