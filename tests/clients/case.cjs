// case.py for Node: test_clients.py passes the constants as JSON.
const { z } = require("zod");

module.exports = {
  ...JSON.parse(process.env.FOREWORD_CLIENTS_CASE),
  Job: z.object({ name: z.string(), age: z.int(), city: z.string(), job: z.string() }),
  report: (results) => console.log(JSON.stringify(results)),
};
