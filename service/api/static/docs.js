// Start Swagger UI. "Try it out" sends requests to the folder of this page, also behind a proxy's path prefix.

const dark = matchMedia("(prefers-color-scheme: dark)");

function follow() {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
}

async function start() {
  const response = await fetch("openapi.json");
  const spec = { ...(await response.json()), servers: [{ url: new URL(".", document.baseURI).pathname }] };
  SwaggerUIBundle({
    spec,
    dom_id: "#swagger-ui",
    deepLinking: true,
    displayRequestDuration: true,
    docExpansion: "list",
    validatorUrl: null, // its default sends the address of the document to validator.swagger.io
  });
}

dark.addEventListener("change", follow);
follow();
start();
