func.func @main(%x: tensor<4x8xf32>, %w: tensor<8x2x!quant.uniform<i8<-127:127>:f32:1, {0.1:2, 0.2}>>) -> tensor<4x2xf32> {
  %q = stablehlo.uniform_quantize %x : (tensor<4x8xf32>) -> tensor<4x8x!quant.uniform<i8:f32, 0.1:2>>
  %d = stablehlo.dot_general %q, %w, contracting_dims = [1] x [0] : (tensor<4x8x!quant.uniform<i8:f32, 0.1:2>>, tensor<8x2x!quant.uniform<i8<-127:127>:f32:1, {0.1:2, 0.2}>>) -> tensor<4x2x!quant.uniform<i32:f32, 0.01>>
  %f = "stablehlo.uniform_dequantize"(%d) : (tensor<4x2x!quant.uniform<i32:f32, 0.01>>) -> tensor<4x2xf32>
  return %f : tensor<4x2xf32>
}
