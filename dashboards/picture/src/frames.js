// Prometheus's answers as the data frames that Grafana's components draw.
import { FieldType, createDataFrame, getDisplayProcessor } from "@grafana/data";

// What Grafana's time series panel takes where a dashboard says nothing.
const UNSAID = { drawStyle: "line", lineInterpolation: "linear", fillOpacity: 0, spanNulls: false, axisPlacement: "auto" };

export function toFrames(panel, series, theme) {
  const { defaults, overrides } = panel.fieldConfig;
  return series.map(({ name, times, values }, seriesIndex) => {
    const own = overrides.filter(({ matcher }) => matcher.options === name).flatMap(({ properties }) => properties);
    const changed = Object.fromEntries(own.map(({ id, value }) => [id, value]));
    const config = { ...defaults, ...changed, displayName: name, custom: { ...UNSAID, ...defaults.custom } };
    const frame = createDataFrame({
      fields: [
        { name: "Time", type: FieldType.time, values: times, config: {} },
        { name, type: FieldType.number, values, config },
      ],
    });
    for (const field of frame.fields) {
      field.state = { ...field.state, seriesIndex };
      field.display = getDisplayProcessor({ field, theme, timeZone: "utc" });
    }
    return frame;
  });
}

export function lastValue(frame) {
  const field = frame.fields[1];
  const value = field.values.findLast((one) => one !== null);
  return { field, display: { ...field.display(value ?? null), title: field.config.displayName } };
}
