// Texts to try, by box and by the name on the button.

export const EXAMPLES = {
  classify: {
    "A happy guest": {
      inputs: "We stopped for coffee at this small café and loved it. The bread was still warm, the staff were friendly, and I would happily drive back tomorrow.",
    },
    "A broken kettle": {
      inputs: "The kettle leaked on its second morning, and the shop now wants me to pay for the parcel back. I regret buying it.",
    },
    "From the news": {
      inputs: "Shares in the shipping company fell by a tenth on Thursday after it warned that higher fuel prices would halve its profit this year.",
    },
  },
  entities: {
    "A laboratory": {
      inputs: "Marie Curie left Warsaw for Paris in 1891 and taught there. With Pierre Curie she shared the Nobel Prize in 1903.",
    },
    "An engine": {
      inputs: "Ada Lovelace met Charles Babbage in London in 1833. Her notes on his engine are kept today at Oxford.",
    },
    "With emoji": {
      inputs: "🎉 On Friday Anna Schmidt leaves Siemens in Munich, and 👩‍🚀 in May she starts at Microsoft in Oslo.",
    },
  },
  labelled: {
    "A concert": {
      inputs: "The Vienna Philharmonic played Mahler's Second in Lucerne on 14 August 2019, on a stage by Jean Nouvel.",
      labels: "orchestra\nwork of music\ncity\ndate\narchitect",
    },
  },
  answers: {
    "A lighthouse": {
      question: "When did electricity arrive?",
      context: "The lighthouse at Saint Orlan was finished in 1861 after nine years of work on the reef. It burned whale oil at first and paraffin from 1874. Electricity came in 1923, by a cable from the mainland, and the last keeper left his post in 1987.",
    },
    "A bridge": {
      question: "Who designed the bridge?",
      context: "The town had argued about a crossing for thirty years. In the end the bridge was designed by Ines Valdor, a young engineer who had never built in stone, and the mason Peter Hult carried out her plan with forty men. Farmers paid for half of it in grain.",
    },
    "No answer": {
      question: "How old is the chapel?",
      context: "Marta keeps bees on the roof of the school, and sells the honey at the market.",
      handle_impossible_answer: true,
    },
  },
  similarity: {
    "A power cut": {
      inputs: "The storm left the village without electricity.\nAfter the gale, houses in the hamlet had no power.\nStrong winds are expected along the coast tonight.\nShe pays her electricity bill once a year.\nThe bakery sells rye bread on Fridays.",
    },
    "A question": {
      inputs: "How do I change my password?\nWhere can I reset my login details?\nMy parcel has not arrived.\nThe keys were left on the kitchen table.\nWhich payment methods do you accept?",
    },
  },
  rerank: {
    "A lost card": {
      query: "I have lost my bank card. What should I do?",
      documents: "Block a lost card at once in the app or by telephone.\nThe branch on Mill Street closes at four.\nA loan is paid back within five years.\nInterest is paid at the end of each year.",
    },
    "A garden": {
      query: "Which plants grow well in the shade?",
      documents: "Ferns and ivy grow well without direct sun.\nTomatoes need eight hours of light a day.\nThe gate was oiled last spring.\nThe gardener comes on Mondays.",
    },
  },
  "zero-shot": {
    "A letter": {
      inputs: "The parcel was wet and the lamp inside was in pieces.",
      labels: "complaint\npraise\nquestion",
    },
  },
  analyze: {
    "A happy guest": {
      inputs: "Marta Lindqvist met us at the hotel in Oslo. It was the best week of the year.",
    },
  },
  tokenize: {
    "Rare words": {
      inputs: "The lighthouse keeper's unforgettable kite flew over Reykjavík 🪁.",
    },
  },
  attention: {
    "A pronoun": {
      inputs: "The violin stayed in its case because it was out of tune.",
    },
  },
  masks: {
    "A harbor": {
      inputs: "The ferry to the [MASK] leaves at noon, when the tide is high.",
    },
    "Two masks": {
      inputs: "She opened the [MASK] and read the [MASK] twice.",
    },
  },
  weights: {
    "A recipe": {
      inputs: "Fold the whipped egg whites into the batter last, so that the cake rises without baking powder.",
    },
    "A question": {
      inputs: "How do I get a refund for a delayed train?",
    },
  },
};
