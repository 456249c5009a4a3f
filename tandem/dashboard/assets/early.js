// Asks for the run that the address names while the rest of the page is still being loaded.

import { askEarly } from "./server.js";

const [kind, name] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
if (kind === "run" && name) askEarly("run", { run: name });
