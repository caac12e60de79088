// A request as code in three languages: the very one that the page sends, with a placeholder for the key.

function curl(url, body, keyed) {
  return [
    `curl -sS ${url}`,
    ...(keyed ? ['-H "Authorization: Bearer $QUARTET_API_KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d '${JSON.stringify(body).replaceAll("'", String.raw`'\''`)}'`,
  ].join(" \\\n  ");
}

// A string in JSON is one in Python, too.
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "boolean") return value ? "True" : "False";
  return JSON.stringify(value);
}

const known = (body) => Object.entries(body).filter(([, value]) => value !== undefined);

function python(url, body, keyed) {
  const bearer = `    headers={"Authorization": f"Bearer {os.environ['QUARTET_API_KEY']}"},`;
  return [
    ...(keyed ? ["import os", ""] : []),
    "import requests",
    "",
    "response = requests.post(",
    `    "${url}",`,
    ...(keyed ? [bearer] : []),
    "    json={",
    ...known(body).map(([name, value]) => `        "${name}": ${literal(value)},`),
    "    },",
    "    timeout=30,",
    ")",
    "response.raise_for_status()",
    "print(response.json())",
  ].join("\n");
}

function javascript(url, body, keyed) {
  return [
    `const response = await fetch("${url}", {`,
    '  method: "POST",',
    "  headers: {",
    '    "Content-Type": "application/json",',
    ...(keyed ? ["    Authorization: `Bearer ${process.env.QUARTET_API_KEY}`,"] : []),
    "  },",
    "  body: JSON.stringify({",
    ...known(body).map(([name, value]) => `    ${name}: ${JSON.stringify(value)},`),
    "  }),",
    "});",
    "console.log(await response.json());",
  ].join("\n");
}

export const LANGUAGES = { curl, Python: python, JavaScript: javascript };
