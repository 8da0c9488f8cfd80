	.file	"<string>"
	.section	.ltext,"axl",@progbits
	.globl	_ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	_ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
_ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	pushq	%rbp
	pushq	%r15
	pushq	%r14
	pushq	%r13
	pushq	%r12
	pushq	%rbx
	subq	$152, %rsp
	movq	424(%rsp), %rdx
	movq	%rdi, -48(%rsp)
	testq	%rdx, %rdx
	jle	.LBB0_12
	movq	392(%rsp), %rsi
	movl	%esi, %eax
	movq	%rsi, %rcx
	andl	$1, %eax
	shrq	%rcx
	addq	%rax, %rcx
	xorl	%eax, %eax
	testq	%rsi, %rsi
	cmovgq	%rcx, %rax
	movq	%rax, 72(%rsp)
	testq	%rax, %rax
	je	.LBB0_12
	movq	400(%rsp), %rax
	movq	224(%rsp), %rdi
	movq	280(%rsp), %rsi
	movq	384(%rsp), %rcx
	movabsq	$9223372036854775806, %r13
	vpxor	%xmm0, %xmm0, %xmm0
	leaq	(%rax,%rax), %r8
	shlq	$2, %rdi
	leaq	(,%rax,4), %r9
	leaq	(%r8,%r8,2), %rbx
	movq	%rdi, -56(%rsp)
	movq	%rax, %rdi
	leaq	(,%rax,8), %rax
	leaq	(%rsi,%r8), %r11
	movq	%r8, 64(%rsp)
	leaq	65536(%rsi,%r8), %r8
	sarq	$4, %rdi
	addq	%r9, %rcx
	movq	%rdi, -128(%rsp)
	andq	%rdi, %r13
	leaq	(%rsi,%r9), %rdi
	movq	%r9, -112(%rsp)
	movq	%rax, -72(%rsp)
	leaq	(%rsi,%rbx), %rax
	leaq	65536(%rsi,%rbx), %r10
	movq	%rbx, 56(%rsp)
	leaq	65536(%rsi,%r9), %rbx
	movq	%r8, -32(%rsp)
	leaq	65536(%rsi), %r8
	movq	%rcx, 48(%rsp)
	movq	%r8, -40(%rsp)
	movq	%r10, -16(%rsp)
	movq	%rbx, -24(%rsp)
	jmp	.LBB0_3
	.p2align	4
.LBB0_11:
	movq	-8(%rsp), %rdx
	decq	%rdx
	jle	.LBB0_12
.LBB0_3:
	movq	%rdx, -8(%rsp)
	movq	-40(%rsp), %rcx
	movq	-32(%rsp), %rdx
	movq	-24(%rsp), %r8
	movq	-16(%rsp), %r9
	xorl	%r10d, %r10d
	xorl	%ebx, %ebx
	jmp	.LBB0_4
	.p2align	4
.LBB0_10:
	movq	(%rsp), %rbx
	movq	8(%rsp), %r10
	movq	16(%rsp), %r9
	movq	24(%rsp), %r8
	movq	32(%rsp), %rdx
	movq	40(%rsp), %rcx
	movq	280(%rsp), %rsi
	incq	%rbx
	addq	$8192, %r10
	addq	$8192, %r9
	addq	$8192, %r8
	addq	$8192, %rdx
	addq	$8192, %rcx
	cmpq	$8, %rbx
	je	.LBB0_11
.LBB0_4:
	movq	%rbx, (%rsp)
	shlq	$13, %rbx
	movq	%rcx, 40(%rsp)
	movq	%rcx, -80(%rsp)
	movq	%rdx, 32(%rsp)
	movq	%rdx, -88(%rsp)
	movq	%r8, 24(%rsp)
	movq	%r8, -96(%rsp)
	movq	%r9, 16(%rsp)
	movq	%r9, -104(%rsp)
	movq	%r10, 8(%rsp)
	movq	%r10, -120(%rsp)
	xorl	%r8d, %r8d
	leaq	65536(%rbx,%rsi), %r14
	addq	%rsi, %rbx
	movl	$8, %esi
	movq	%rbx, 88(%rsp)
	movq	%r14, 80(%rsp)
	jmp	.LBB0_5
	.p2align	4
.LBB0_9:
	movq	-72(%rsp), %rcx
	movq	96(%rsp), %r8
	movq	104(%rsp), %rsi
	addq	%rcx, -120(%rsp)
	addq	%rcx, -104(%rsp)
	addq	%rcx, -96(%rsp)
	addq	%rcx, -88(%rsp)
	addq	%rcx, -80(%rsp)
	addq	$4, %r8
	subq	$1, %rsi
	jbe	.LBB0_10
.LBB0_5:
	movq	64(%rsp), %rdx
	movq	208(%rsp), %rcx
	movq	%rsi, 104(%rsp)
	movq	%r8, %rsi
	movq	%r8, 96(%rsp)
	movq	48(%rsp), %rbx
	xorl	%r12d, %r12d
	imulq	%rdx, %rsi
	addq	80(%rsp), %rsi
	leaq	(%rcx,%r8,4), %rcx
	imulq	400(%rsp), %r8
	movq	%rcx, 144(%rsp)
	addq	88(%rsp), %r8
	leaq	(%rsi,%rdx), %rcx
	movq	%rsi, -64(%rsp)
	movq	%rcx, 128(%rsp)
	movq	-112(%rsp), %rcx
	movq	%r8, 136(%rsp)
	movq	72(%rsp), %r8
	addq	%rsi, %rcx
	movq	%rcx, 120(%rsp)
	movq	56(%rsp), %rcx
	addq	%rsi, %rcx
	movq	384(%rsp), %rsi
	movq	%rcx, 112(%rsp)
	jmp	.LBB0_6
.LBB0_14:
	xorl	%ebp, %ebp
.LBB0_18:
	movq	%rbp, %r9
	shlq	$6, %r9
	shlq	$5, %rbp
	movq	%r12, %rcx
	imulq	-112(%rsp), %rcx
	prefetcht1	(%r9,%rdx)
	addq	$65536, %rdx
	prefetcht1	(%rdx,%r9)
	movq	-64(%rsp), %rdx
	addq	384(%rsp), %rcx
	vmovdqu	(%rbp,%rdx), %ymm5
	movq	128(%rsp), %rdx
	vmovdqu	(%rbp,%rdx), %ymm6
	movq	120(%rsp), %rdx
	vpslld	$16, %ymm5, %ymm9
	vfmadd213ps	(%r9,%rcx), %ymm4, %ymm9
	vpblendw	$170, %ymm5, %ymm0, %ymm5
	vmovdqu	(%rbp,%rdx), %ymm7
	movq	112(%rsp), %rdx
	vpslld	$16, %ymm6, %ymm10
	vmovdqu	(%rbp,%rdx), %ymm8
	vfmadd213ps	%ymm9, %ymm3, %ymm10
	vpslld	$16, %ymm7, %ymm9
	vfmadd213ps	%ymm10, %ymm2, %ymm9
	vpslld	$16, %ymm8, %ymm10
	vfmadd213ps	%ymm9, %ymm1, %ymm10
	vmovups	%ymm10, (%r9,%rcx)
	vfmadd213ps	32(%r9,%rcx), %ymm4, %ymm5
	vpblendw	$170, %ymm6, %ymm0, %ymm4
	vfmadd213ps	%ymm5, %ymm3, %ymm4
	vpblendw	$170, %ymm7, %ymm0, %ymm3
	vfmadd213ps	%ymm4, %ymm2, %ymm3
	vpblendw	$170, %ymm8, %ymm0, %ymm2
	vfmadd213ps	%ymm3, %ymm1, %ymm2
	vmovups	%ymm2, 32(%r9,%rcx)
.LBB0_8:
	movq	-72(%rsp), %rcx
	addq	$2, %r12
	addq	%rcx, %rsi
	addq	%rcx, %rbx
	cmpq	$1, %r8
	leaq	-1(%r8), %r8
	jle	.LBB0_9
.LBB0_6:
	movq	%r12, %rcx
	imulq	-56(%rsp), %rcx
	movq	-64(%rsp), %rdx
	movq	%r12, %r9
	addq	144(%rsp), %rcx
	testq	%r12, %r12
	cmoveq	136(%rsp), %rdx
	orq	$1, %r9
	cmpq	392(%rsp), %r9
	jge	.LBB0_7
	cmpq	$0, -128(%rsp)
	jle	.LBB0_8
	movq	-56(%rsp), %r9
	vbroadcastss	(%rcx), %ymm1
	vbroadcastss	4(%rcx), %ymm2
	vbroadcastss	8(%rcx), %ymm3
	vbroadcastss	12(%rcx), %ymm4
	movq	-88(%rsp), %r15
	movq	-96(%rsp), %r14
	movq	-104(%rsp), %r10
	xorl	%ebp, %ebp
	vbroadcastss	(%rcx,%r9), %ymm5
	vbroadcastss	4(%rcx,%r9), %ymm6
	vbroadcastss	8(%rcx,%r9), %ymm7
	vbroadcastss	12(%rcx,%r9), %ymm8
	movq	-80(%rsp), %rcx
	movq	-128(%rsp), %r9
	.p2align	4
.LBB0_21:
	vmovdqu	(%rcx), %ymm11
	vmovups	(%rsi,%rbp), %ymm14
	vmovdqu	(%r15), %ymm12
	vmovdqu	(%r14), %ymm10
	vmovdqu	(%r10), %ymm9
	prefetcht1	(%rdx,%rbp)
	prefetcht1	65536(%rdx,%rbp)
	addq	$32, %r10
	addq	$32, %r14
	addq	$32, %r15
	addq	$32, %rcx
	vpslld	$16, %ymm11, %ymm13
	vpslld	$16, %ymm12, %ymm15
	vpblendw	$170, %ymm11, %ymm0, %ymm11
	vpblendw	$170, %ymm12, %ymm0, %ymm12
	vfmadd231ps	%ymm13, %ymm1, %ymm14
	vfmadd213ps	(%rbx,%rbp), %ymm5, %ymm13
	vfmadd231ps	%ymm15, %ymm2, %ymm14
	vfmadd231ps	%ymm15, %ymm6, %ymm13
	vpslld	$16, %ymm10, %ymm15
	vpblendw	$170, %ymm10, %ymm0, %ymm10
	vfmadd231ps	%ymm15, %ymm3, %ymm14
	vfmadd231ps	%ymm15, %ymm7, %ymm13
	vpslld	$16, %ymm9, %ymm15
	vpblendw	$170, %ymm9, %ymm0, %ymm9
	vfmadd231ps	%ymm15, %ymm4, %ymm14
	vfmadd231ps	%ymm15, %ymm8, %ymm13
	vmovups	%ymm14, (%rsi,%rbp)
	vmovups	%ymm13, (%rbx,%rbp)
	vmovups	32(%rsi,%rbp), %ymm13
	vfmadd231ps	%ymm11, %ymm1, %ymm13
	vfmadd213ps	32(%rbx,%rbp), %ymm5, %ymm11
	vfmadd231ps	%ymm12, %ymm2, %ymm13
	vfmadd231ps	%ymm10, %ymm3, %ymm13
	vfmadd231ps	%ymm12, %ymm6, %ymm11
	vfmadd231ps	%ymm9, %ymm4, %ymm13
	vfmadd231ps	%ymm10, %ymm7, %ymm11
	vmovups	%ymm13, 32(%rsi,%rbp)
	vfmadd231ps	%ymm9, %ymm8, %ymm11
	vmovups	%ymm11, 32(%rbx,%rbp)
	addq	$64, %rbp
	decq	%r9
	jne	.LBB0_21
	jmp	.LBB0_8
	.p2align	4
.LBB0_7:
	cmpq	$0, -128(%rsp)
	jle	.LBB0_8
	vbroadcastss	(%rcx), %ymm4
	vbroadcastss	4(%rcx), %ymm3
	vbroadcastss	8(%rcx), %ymm2
	vbroadcastss	12(%rcx), %ymm1
	cmpq	$1, -128(%rsp)
	je	.LBB0_14
	movq	-120(%rsp), %rcx
	movq	280(%rsp), %r9
	xorl	%r15d, %r15d
	xorl	%ebp, %ebp
	.p2align	4
.LBB0_16:
	vmovdqu	65536(%r9,%rcx), %ymm5
	vmovdqu	65536(%r11,%rcx), %ymm6
	vmovdqu	65536(%rdi,%rcx), %ymm7
	vmovdqu	65536(%rax,%rcx), %ymm8
	prefetcht1	(%rdx,%r15)
	prefetcht1	65536(%rdx,%r15)
	addq	$2, %rbp
	vpslld	$16, %ymm5, %ymm9
	vfmadd213ps	(%rsi,%r15), %ymm4, %ymm9
	vpslld	$16, %ymm6, %ymm10
	vpblendw	$170, %ymm5, %ymm0, %ymm5
	vpblendw	$170, %ymm6, %ymm0, %ymm6
	vfmadd213ps	%ymm9, %ymm3, %ymm10
	vpslld	$16, %ymm7, %ymm9
	vfmadd213ps	%ymm10, %ymm2, %ymm9
	vpslld	$16, %ymm8, %ymm10
	vfmadd213ps	%ymm9, %ymm1, %ymm10
	vmovups	%ymm10, (%rsi,%r15)
	vfmadd213ps	32(%rsi,%r15), %ymm4, %ymm5
	vfmadd213ps	%ymm5, %ymm3, %ymm6
	vpblendw	$170, %ymm7, %ymm0, %ymm5
	vfmadd213ps	%ymm6, %ymm2, %ymm5
	vpblendw	$170, %ymm8, %ymm0, %ymm6
	vfmadd213ps	%ymm5, %ymm1, %ymm6
	vmovups	%ymm6, 32(%rsi,%r15)
	prefetcht1	64(%rdx,%r15)
	prefetcht1	65600(%rdx,%r15)
	vmovdqu	65568(%r9,%rcx), %ymm5
	vmovdqu	65568(%r11,%rcx), %ymm6
	vmovdqu	65568(%rdi,%rcx), %ymm7
	vmovdqu	65568(%rax,%rcx), %ymm8
	addq	$64, %rcx
	vpslld	$16, %ymm5, %ymm9
	vfmadd213ps	64(%rsi,%r15), %ymm4, %ymm9
	vpslld	$16, %ymm6, %ymm10
	vpblendw	$170, %ymm5, %ymm0, %ymm5
	vpblendw	$170, %ymm6, %ymm0, %ymm6
	vfmadd213ps	%ymm9, %ymm3, %ymm10
	vpslld	$16, %ymm7, %ymm9
	vfmadd213ps	%ymm10, %ymm2, %ymm9
	vpslld	$16, %ymm8, %ymm10
	vfmadd213ps	%ymm9, %ymm1, %ymm10
	vmovups	%ymm10, 64(%rsi,%r15)
	vfmadd213ps	96(%rsi,%r15), %ymm4, %ymm5
	vfmadd213ps	%ymm5, %ymm3, %ymm6
	vpblendw	$170, %ymm7, %ymm0, %ymm5
	vfmadd213ps	%ymm6, %ymm2, %ymm5
	vpblendw	$170, %ymm8, %ymm0, %ymm6
	vfmadd213ps	%ymm5, %ymm1, %ymm6
	vmovups	%ymm6, 96(%rsi,%r15)
	subq	$-128, %r15
	cmpq	%rbp, %r13
	jne	.LBB0_16
	testb	$1, -128(%rsp)
	jne	.LBB0_18
	jmp	.LBB0_8
.LBB0_12:
	movq	-48(%rsp), %rax
	movq	$0, (%rax)
	xorl	%eax, %eax
	addq	$152, %rsp
	popq	%rbx
	popq	%r12
	popq	%r13
	popq	%r14
	popq	%r15
	popq	%rbp
	vzeroupper
	retq
.Lfunc_end0:
	.size	_ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end0-_ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx

	.globl	_ZN7cpython8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	_ZN7cpython8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
_ZN7cpython8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%r13
	.cfi_def_cfa_offset 40
	pushq	%r12
	.cfi_def_cfa_offset 48
	pushq	%rbx
	.cfi_def_cfa_offset 56
	subq	$568, %rsp
	.cfi_def_cfa_offset 624
	.cfi_offset %rbx, -56
	.cfi_offset %r12, -48
	.cfi_offset %r13, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
	leaq	272(%rsp), %rax
	movq	%rsi, %rdi
	movabsq	$.const.weigh, %rsi
	movabsq	$PyArg_UnpackTuple, %r10
	leaq	296(%rsp), %r8
	leaq	288(%rsp), %r9
	movl	$4, %edx
	movl	$4, %ecx
	xorl	%ebx, %ebx
	movq	%rax, 8(%rsp)
	leaq	280(%rsp), %rax
	movq	%rax, (%rsp)
	xorl	%eax, %eax
	callq	*%r10
	testl	%eax, %eax
	je	.LBB1_21
	movabsq	$_ZN08NumbaEnv8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	cmpq	$0, (%rax)
	je	.LBB1_2
	movq	296(%rsp), %rdi
	movabsq	$NRT_adapt_ndarray_from_python, %r15
	leaq	384(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 384(%rsp)
	vmovups	%ymm0, 416(%rsp)
	movq	$0, 448(%rsp)
	vzeroupper
	callq	*%r15
	cmpq	$4, 408(%rsp)
	setne	%cl
	testl	%eax, %eax
	setne	%bl
	orb	%cl, %bl
	cmpb	$1, %bl
	je	.LBB1_4
	testb	%bl, %bl
	jne	.LBB1_6
.LBB1_7:
	movq	288(%rsp), %rdi
	movq	384(%rsp), %r14
	movq	416(%rsp), %r12
	movq	432(%rsp), %r13
	leaq	464(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 464(%rsp)
	vmovups	%ymm0, 496(%rsp)
	vmovups	%ymm0, 528(%rsp)
	movq	$0, 560(%rsp)
	vzeroupper
	callq	*%r15
	cmpq	$2, 488(%rsp)
	setne	%cl
	testl	%eax, %eax
	setne	%bl
	orb	%cl, %bl
	jne	.LBB1_8
	testb	%bl, %bl
	jne	.LBB1_14
.LBB1_10:
	movq	496(%rsp), %rax
	movq	280(%rsp), %rdi
	movq	464(%rsp), %rbp
	leaq	304(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 304(%rsp)
	vmovups	%ymm0, 336(%rsp)
	movq	$0, 368(%rsp)
	movq	%rax, 264(%rsp)
	vzeroupper
	callq	*%r15
	cmpq	$4, 328(%rsp)
	setne	%cl
	testl	%eax, %eax
	setne	%bl
	orb	%cl, %bl
	jne	.LBB1_11
	testb	%bl, %bl
	jne	.LBB1_13
.LBB1_15:
	movq	304(%rsp), %rax
	movq	272(%rsp), %rdi
	movq	%rbp, 240(%rsp)
	movq	%r14, 248(%rsp)
	movq	336(%rsp), %rbx
	movq	344(%rsp), %r14
	movq	352(%rsp), %rbp
	movq	%r13, %r15
	movq	%r12, 256(%rsp)
	movq	%rax, 232(%rsp)
	movabsq	$PyNumber_Long, %rax
	callq	*%rax
	testq	%rax, %rax
	je	.LBB1_16
	movq	%rax, %r13
	movabsq	$PyLong_AsLongLong, %rax
	movq	%r13, %rdi
	callq	*%rax
	movq	%rax, %r12
	movabsq	$Py_DecRef, %rax
	movq	%r13, %rdi
	callq	*%rax
	movabsq	$PyErr_Occurred, %rax
	callq	*%rax
	testq	%rax, %rax
	jne	.LBB1_17
.LBB1_20:
	movq	264(%rsp), %rax
	movq	256(%rsp), %rdi
	movq	%r12, 216(%rsp)
	movq	%rbp, 192(%rsp)
	movq	%r14, 184(%rsp)
	movq	%rbx, 176(%rsp)
	movq	%r15, 16(%rsp)
	movq	%rax, 72(%rsp)
	movq	%rdi, (%rsp)
	movabsq	$_ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	leaq	376(%rsp), %rdi
	callq	*%rax
	movq	248(%rsp), %rdi
	movabsq	$NRT_decref, %rbx
	callq	*%rbx
	movq	240(%rsp), %rdi
	callq	*%rbx
	movq	232(%rsp), %rdi
	callq	*%rbx
	movabsq	$_Py_NoneStruct, %rbx
	movabsq	$Py_IncRef, %rax
	movq	%rbx, %rdi
	callq	*%rax
.LBB1_21:
	movq	%rbx, %rax
	addq	$568, %rsp
	.cfi_def_cfa_offset 56
	popq	%rbx
	.cfi_def_cfa_offset 48
	popq	%r12
	.cfi_def_cfa_offset 40
	popq	%r13
	.cfi_def_cfa_offset 32
	popq	%r14
	.cfi_def_cfa_offset 24
	popq	%r15
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.LBB1_2:
	.cfi_def_cfa_offset 624
	movabsq	$PyExc_RuntimeError, %rdi
	movabsq	$".const.missing Environment: _ZN08NumbaEnv8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	xorl	%ebx, %ebx
	jmp	.LBB1_21
.LBB1_4:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	testb	%bl, %bl
	je	.LBB1_7
.LBB1_6:
	xorl	%ebx, %ebx
	jmp	.LBB1_21
.LBB1_8:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	testb	%bl, %bl
	je	.LBB1_10
	jmp	.LBB1_14
.LBB1_11:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	testb	%bl, %bl
	je	.LBB1_15
	jmp	.LBB1_13
.LBB1_16:
	xorl	%r12d, %r12d
	movabsq	$PyErr_Occurred, %rax
	callq	*%rax
	testq	%rax, %rax
	je	.LBB1_20
.LBB1_17:
	movq	232(%rsp), %rdi
	movabsq	$NRT_decref, %rax
	callq	*%rax
	movq	248(%rsp), %r14
	movq	240(%rsp), %rbp
.LBB1_13:
	movabsq	$NRT_decref, %rax
	movq	%rbp, %rdi
	callq	*%rax
.LBB1_14:
	movabsq	$NRT_decref, %rax
	movq	%r14, %rdi
	callq	*%rax
	xorl	%ebx, %ebx
	jmp	.LBB1_21
.Lfunc_end1:
	.size	_ZN7cpython8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end1-_ZN7cpython8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.cfi_endproc

	.globl	cfunc._ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	cfunc._ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
cfunc._ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	subq	$232, %rsp
	vmovaps	400(%rsp), %xmm0
	movq	416(%rsp), %rdx
	movq	440(%rsp), %rsi
	movq	240(%rsp), %rax
	movq	296(%rsp), %rcx
	movq	$0, 224(%rsp)
	leaq	224(%rsp), %rdi
	movq	%rsi, 216(%rsp)
	movq	%rdx, 192(%rsp)
	vmovups	%xmm0, 176(%rsp)
	movq	%rax, 16(%rsp)
	movabsq	$_ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	movq	%rcx, 72(%rsp)
	movq	%r8, (%rsp)
	callq	*%rax
	movq	224(%rsp), %rax
	addq	$232, %rsp
	retq
.Lfunc_end2:
	.size	cfunc._ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end2-cfunc._ZN8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx

	.weak	NRT_decref
	.p2align	4
	.type	NRT_decref,@function
NRT_decref:
	.cfi_startproc
	testq	%rdi, %rdi
	je	.LBB3_2
	#MEMBARRIER
	lock		decq	(%rdi)
	je	.LBB3_3
.LBB3_2:
	retq
.LBB3_3:
	movabsq	$NRT_MemInfo_call_dtor, %rax
	#MEMBARRIER
	jmpq	*%rax
.Lfunc_end3:
	.size	NRT_decref, .Lfunc_end3-NRT_decref
	.cfi_endproc

	.type	.const.weigh,@object
	.section	.lrodata,"al",@progbits
.const.weigh:
	.asciz	"weigh"
	.size	.const.weigh, 6

	.type	_ZN08NumbaEnv8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@object
	.comm	_ZN08NumbaEnv8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,8,8
	.type	".const.missing Environment: _ZN08NumbaEnv8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx",@object
	.p2align	4, 0x0
".const.missing Environment: _ZN08NumbaEnv8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx":
	.asciz	"missing Environment: _ZN08NumbaEnv8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx"
	.size	".const.missing Environment: _ZN08NumbaEnv8__main__5weighB2v3B76c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughipCQA_3dE5ArrayIfLi2E1C7mutable7alignedE5ArrayItLi4E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx", 228

	.type	".const.can't unbox array from PyObject into native value.  The object maybe of a different type",@object
	.p2align	4, 0x0
".const.can't unbox array from PyObject into native value.  The object maybe of a different type":
	.asciz	"can't unbox array from PyObject into native value.  The object maybe of a different type"
	.size	".const.can't unbox array from PyObject into native value.  The object maybe of a different type", 89

	.section	".note.GNU-stack","",@progbits
