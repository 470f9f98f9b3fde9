// Draws the dashboard's panels from recorded data (data.json) with Grafana's component library, without Grafana.
import { createRoot } from "react-dom/client";
import { ThemeContext, createTheme, dateTime } from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, TimeSeries } from "@grafana/ui";
import { lastValue, toFrames } from "./frames.js";

const COLUMN = 58;
const LINE = 30;
const GAP = 8;
const theme = createTheme({ colors: { mode: "dark" } });

function Board({ board, answers, from, to }) {
  const bottom = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  const range = { from: dateTime(from), to: dateTime(to), raw: { from: dateTime(from), to: dateTime(to) } };
  return (
    <div style={{ position: "relative", width: 24 * COLUMN + GAP, height: bottom * (LINE + GAP) + GAP }}>
      {board.panels.map((panel) => (
        <Place key={panel.id} at={panel.gridPos}>
          {panel.type === "row" ? <Heading title={panel.title} /> : <Panel {...{ panel, range }} series={answers[panel.id]} />}
        </Place>
      ))}
    </div>
  );
}

function Place({ at, children }) {
  const box = { left: at.x * COLUMN + GAP, top: at.y * (LINE + GAP) + GAP };
  return <div style={{ position: "absolute", ...box }}>{children}</div>;
}

function Heading({ title }) {
  return <h2 style={{ fontSize: 18, margin: 0, lineHeight: `${LINE}px` }}>{title}</h2>;
}

function Panel({ panel, series, range }) {
  const { w, h } = panel.gridPos;
  const frames = toFrames(panel, series, theme);
  const size = { width: w * COLUMN - GAP, height: h * (LINE + GAP) - GAP };
  return (
    <PanelChrome title={panel.title} description={panel.description} {...size}>
      {(width, height) => {
        if (frames.length === 0) {
          return <Nothing text={panel.fieldConfig.defaults.noValue} {...{ width, height }} />;
        }
        const Draw = panel.type === "stat" ? Tiles : Lines;
        return <Draw {...{ panel, frames, range, width, height }} />;
      }}
    </PanelChrome>
  );
}

function Nothing({ text, width, height }) {
  return (
    <div style={{ width, height, display: "grid", placeItems: "center", color: theme.colors.text.secondary }}>{text}</div>
  );
}

function Lines({ panel, frames, range, width, height }) {
  return <TimeSeries frames={frames} timeRange={range} timeZone="utc" legend={panel.options.legend} {...{ width, height }} />;
}

function Tiles({ panel, frames, width, height }) {
  return (
    <div style={{ display: "flex" }}>
      {frames.map((frame, place) => {
        const { field, display } = lastValue(frame);
        const sparkline = { y: field, x: frame.fields[0] };
        const { graphMode, colorMode } = panel.options;
        const isNamed = frames.length > 1 || panel.options.textMode === "value_and_name";
        const textMode = isNamed ? "value_and_name" : "value";
        return (
          <BigValue
            key={place}
            value={display}
            width={width / frames.length}
            {...{ theme, sparkline, graphMode, colorMode, textMode, height }}
          />
        );
      })}
    </div>
  );
}

const data = await (await fetch("data.json")).json();
createRoot(document.getElementById("root")).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <Board {...data} />
  </ThemeContext.Provider>,
);
