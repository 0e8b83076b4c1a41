"""Text of many kinds for a calibration when nobody gave one: prose, talk, instructions, code, figures, several languages."""

CALIBRATION_TEXT = '''\
The harbour was quiet when the ferry came in. Two men in yellow coats caught the ropes, and a dog that belonged to neither of them ran up \
and down the quay, barking at the water. Nobody got off but an old woman with a basket of pears. She looked at the clock above the customs \
house, which had stopped years ago at ten past four, set her own watch by it, and walked up the hill without asking anyone the way.

"You are late," said her brother.
"By the clock I am early."
"That clock has been wrong since the war."
"Then it is the only thing in this town that has not changed its mind."

How to repair a dripping tap. First close the valve under the basin and open the tap until no water comes. Take off the handle; most are \
held by one screw below a small cap. Unscrew the bonnet with a wrench of 17 mm and draw out the spindle. At its end sits a rubber washer: \
replace it if it is hard, torn or worn on one side. Clean the seat with a cloth, grease the thread lightly, and put everything together in \
the opposite order. If the tap still drips after that, the seat itself is damaged and has to be ground or renewed.

A glacier is a river that moves too slowly to be seen. Snow that falls on its upper part is pressed into ice by the snow of later years, \
and the ice creeps downhill under its own weight, a few centimetres to some metres a day. Where more melts than flows in, it ends. Since \
1850 the glaciers of the Alps have lost about two thirds of their volume, and the loss has become faster: between 2000 and 2020 it was \
roughly 1.3 cubic kilometres a year.

def median(values: list[float]) -> float:
    """The middle of the sorted values, or the mean of the two in the middle."""
    if not values:
        raise ValueError("median of nothing")
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2

for (int row = 0; row < rows; ++row) {
  float sum = bias ? bias[row] : 0.0f;
  for (int col = 0; col < cols; ++col) sum += weight[row * cols + col] * x[col];
  out[row] = sum;
}

SELECT country, COUNT(*) AS orders, SUM(price * quantity) AS total FROM orders JOIN customers USING (customer_id)
WHERE ordered_at >= '2023-01-01' GROUP BY country HAVING total > 10000 ORDER BY total DESC;

{"name": "sensor-17", "unit": "degC", "readings": [21.5, 21.7, 21.6, null, 22.0], "ok": true}

Question: A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?
Answer: 210 / 84 = 2.5, so it travels for two and a half hours and arrives at 12:10.

Question: Let f(x) = x^2 - 6x + 5. Where is f smallest?
Answer: f'(x) = 2x - 6 is zero at x = 3, and f(3) = 9 - 18 + 5 = -4. As f'' = 2 > 0, this is the minimum.

Dear Ms Okafor, thank you for your letter of 3 March. We are sorry that the second parcel did not reach you. A replacement was sent \
today by registered mail and should arrive within five working days; you need not return anything. With kind regards, the service team.

The council voted on Tuesday, by 31 to 14, to close the inner ring road to cars on Sundays. Shop owners had warned of losses, while two \
schools and the hospital supported the plan. The rule will be tried for six months from April and then judged by counts of visitors, \
bus delays and air quality at nine stations.

Der Wald war im Winter stiller als sonst, nur der Schnee fiel manchmal von den Ästen. Wer früh genug aufstand, sah die Spuren der Rehe \
bis an den Zaun. Niemand wusste, warum sie jedes Jahr wiederkamen.

Le boulanger ouvre sa boutique à six heures. Il connaît le nom de tous ses clients, et presque toujours ce qu'ils vont acheter. Quand il \
pleut, il laisse la porte ouverte pour que l'on sente le pain jusque sur la place.

El médico le recomendó caminar media hora cada día y dormir con la ventana abierta. Al cabo de un mes se sentía mejor, aunque no habría \
sabido decir por qué.

春天来了。河边的柳树先绿了。孩子们放学以后在桥上放风筝。老人们坐在茶馆里下棋。

- 500 g flour, 10 g salt, 7 g dried yeast, 320 ml lukewarm water
- Mix, knead for ten minutes, let rise for an hour under a cloth
- Shape two loaves, let rise again, bake at 230 °C for 25 to 30 minutes

She had learned the trick from her grandfather: to find a fault in a long cable, measure in the middle. If the middle is sound, the fault \
is beyond it; if not, before it. Measure again in the middle of what is left. After ten steps a thousand metres have become one. "It works \
for cables," he used to say, "and for most arguments."
'''
