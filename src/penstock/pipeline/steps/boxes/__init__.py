"""Steps on boxes: [n, 4] as left, top, right, bottom, or quadrilaterals [n, 4, 2] as x, y of each corner, both in FP32."""
